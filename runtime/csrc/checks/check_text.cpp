// Formats dtypes, devices and shapes for messages.

#include "checks/checker.h"
#include "checks/element_types.h"

namespace nvgemm {
namespace {

std::string Listed(const int64_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) text += Text(i == 0 ? "" : ", ", values[i]);
  return text + ")";
}

}  // namespace

std::string DTypeText(DLDataType dtype) {
  if (const ElementType* row = FindElementType(dtype)) return row->torch_name;
  const char* name = "dtype";
  switch (dtype.code) {
    case kDLInt: name = "int"; break;
    case kDLUInt: name = "uint"; break;
    case kDLFloat: name = "float"; break;
    case kDLBfloat: name = "bfloat"; break;
    case kDLComplex: name = "complex"; break;
    case kDLBool: return "bool";
    case kDLOpaqueHandle: return "of a dtype that no kernel takes";  // ViewOf(OwnedTensor)
    default: return Text("dtype(code ", dtype.code, ", bits ", dtype.bits, ", lanes ",
                         dtype.lanes, ")");
  }
  std::string text = Text(name, dtype.bits);
  if (dtype.lanes != 1) text += Text("x", dtype.lanes);
  return text;
}

std::string DeviceText(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  if (device.device_type == kDLCUDA) return Text("cuda:", device.device_id);
  return Text("device type ", static_cast<int>(device.device_type), " (DLPack), index ",
              device.device_id);
}

std::string ShapeText(const DLTensor& tensor) { return Listed(tensor.shape, tensor.ndim); }

std::string StridesText(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return "of a compact tensor";
  return Listed(tensor.strides, tensor.ndim);
}

}  // namespace nvgemm
