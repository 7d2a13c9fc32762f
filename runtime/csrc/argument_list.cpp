#include "argument_list.h"

#include <cstring>

#include "failure.h"
#include "ffi_error.h"

namespace nvgemm {
namespace {

// TVM-FFI's constructor of arrays; never released.
TVMFFIObjectHandle ArrayConstructor() {
  static const TVMFFIObjectHandle constructor = [] {
    constexpr char kName[] = "ffi.Array";
    const TVMFFIByteArray name{kName, sizeof(kName) - 1};
    TVMFFIObjectHandle function = nullptr;
    if (TVMFFIFunctionGetGlobal(&name, &function) != 0) throw TakeRaisedError(kName);
    if (function == nullptr) throw Failure(kRuntimeError, "TVM-FFI has no function ffi.Array");
    return function;
  }();
  return constructor;
}

// The array (m, n, k, batch); k counts values.
TVMFFIObjectHandle MakeMnkl(const KernelSpec& spec, const CheckedCall& call) {
  const TensorView& a = call[Role::kA];
  const TensorView& out = call[Role::kOut];
  const int rank = spec.rank();
  const int64_t n = out.shape[rank - 1] * spec.columns_per_result();
  const int64_t extents[] = {out.shape[rank - 2], n,
                             a.shape[rank - 1] * spec.a_dtype.lanes, rank == 3 ? out.shape[0] : 1};
  TVMFFIAny values[4] = {};
  for (int i = 0; i < 4; ++i) {
    values[i].type_index = kTVMFFIInt;
    values[i].v_int64 = extents[i];
  }
  TVMFFIAny array{};
  array.type_index = kTVMFFINone;
  if (TVMFFIFunctionCall(ArrayConstructor(), values, 4, &array) != 0) {
    throw TakeRaisedError("making the array of a kernel's extents");
  }
  return array.v_obj;
}

// torch takes back the workspace in the order of its own current stream.
void CheckStream(const KernelSpec& spec, DLDevice device, void* stream) {
  if (device.device_type != kDLCUDA || CurrentCudaStream(device.device_id) == stream) return;
  throw Failure(kValueError, Text("kernel ", ShortId(spec.id), " needs a workspace of ",
                                  spec.workspace_bytes, " bytes, and its launch is not on torch's "
                                  "current stream; launch it under torch.cuda.stream()"));
}

}  // namespace

ArgumentList::ArgumentList(const KernelSpec& spec, CheckedCall* call, void* stream) {
  if (spec.workspace_bytes > 0) {
    const DLDevice device = (*call)[Role::kA].tensor.device;
    CheckStream(spec, device, stream);
    workspace_.emplace(AllocateBytes(device, spec.workspace_bytes));
    workspace_view_ = ViewOf(*workspace_);
  }
  for (const Parameter& parameter : spec.parameters) {
    TVMFFIAny& argument = arguments_[size_++];
    switch (parameter.kind) {
      case Parameter::Kind::kTensor:
        argument.type_index = kTVMFFIDLTensorPtr;
        argument.v_ptr = &(*call)[parameter.role].tensor;
        break;
      case Parameter::Kind::kPointer:
        argument.type_index = kTVMFFIOpaquePtr;
        argument.v_ptr = (*call)[parameter.role].data();
        break;
      case Parameter::Kind::kMnkl:
        mnkl_ = MakeMnkl(spec, *call);
        argument.type_index = kTVMFFIArray;
        argument.v_obj = static_cast<TVMFFIObject*>(mnkl_);
        break;
      case Parameter::Kind::kWorkspace:
        argument.type_index = kTVMFFIDLTensorPtr;
        argument.v_ptr = &workspace_view_;
        break;
      case Parameter::Kind::kStream:
        argument.type_index = kTVMFFIOpaquePtr;
        argument.v_ptr = stream;
        break;
    }
  }
}

ArgumentList::~ArgumentList() {
  if (mnkl_ != nullptr) TVMFFIObjectDecRef(mnkl_);
}

}  // namespace nvgemm
