#include "torch/torch_values.h"

#include <atomic>
#include <iterator>
#include <string>

#include "driver/dynamic_loading.h"
#include "checks/element_types.h"
#include "core/failure.h"

namespace nvgemm {
namespace {

namespace shim = torch_shim;

// Returns a function from an already loaded library; null if either does not exist.
template <typename Function>
Function FindLoaded(const char* library_name, const char* function_name) {
  void* library = dlopen(library_name, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<Function>(dlsym(library, function_name));
}

// torch's numbers for device types and dtypes, which are not part of its ABI.
struct Numbers {
  const int32_t cpu = shim::aoti_torch_device_type_cpu();
  const int32_t cuda = shim::aoti_torch_device_type_cuda();
  int32_t dtypes[std::size(kElementTypes)];

  Numbers() {
    for (size_t i = 0; i < std::size(kElementTypes); ++i) {
      const ElementType& row = kElementTypes[i];
      const std::string function_name = std::string(shim::kDTypePrefix) + row.torch_name;
      const auto function =
          FindLoaded<shim::GetNumber>("libtorch_cpu.so", function_name.c_str());
      // A torch older than the function still uses this number.
      dtypes[i] = function != nullptr ? function() : row.torch_number;
    }
  }

  static const Numbers& Get() {
    static const Numbers numbers;
    return numbers;
  }

  DLDataType DLPackDType(int32_t torch) const {
    for (size_t i = 0; i < std::size(kElementTypes); ++i) {
      if (dtypes[i] == torch) return kElementTypes[i].dlpack;
    }
    return {static_cast<uint8_t>(kDLOpaqueHandle), 0, 0};  // equals no kernel's dtype
  }

  int32_t TorchDType(DLDataType dlpack) const {
    for (size_t i = 0; i < std::size(kElementTypes); ++i) {
      const DLDataType& candidate = kElementTypes[i].dlpack;
      if (candidate.code == dlpack.code && candidate.bits == dlpack.bits) return dtypes[i];
    }
    throw Failure(kTypeError, Text("torch has no dtype for DLPack code ", dlpack.code, ", ",
                                   dlpack.bits, " bits"));
  }
};

}  // namespace

void Check(shim::Error error, const char* function) {
  if (error == 0) return;
  const auto text = FindLoaded<shim::GetExceptionText>("libtorch_cpu.so", shim::kGetExceptionText);
  throw Failure(kRuntimeError, Text("torch's ", function, " failed: ",
                                    text != nullptr ? text() : "see torch's message on stderr"));
}

std::string_view ViewOf(const OwnedString& string) {
  const char* text = nullptr;
  size_t length = 0;
  Check(shim::torch_string_c_str(string.get(), &text), "torch_string_c_str");
  Check(shim::torch_string_length(string.get(), &length), "torch_string_length");
  return {text, length};
}

DLTensor ViewOf(const OwnedTensor& tensor) {
  const Numbers& numbers = Numbers::Get();
  DLTensor view{};
  int64_t rank = 0;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  Check(shim::aoti_torch_get_data_ptr(tensor.get(), &view.data), "aoti_torch_get_data_ptr");
  Check(shim::aoti_torch_get_dim(tensor.get(), &rank), "aoti_torch_get_dim");
  Check(shim::aoti_torch_get_sizes(tensor.get(), &view.shape), "aoti_torch_get_sizes");
  Check(shim::aoti_torch_get_strides(tensor.get(), &view.strides), "aoti_torch_get_strides");
  Check(shim::aoti_torch_get_dtype(tensor.get(), &dtype), "aoti_torch_get_dtype");
  Check(shim::aoti_torch_get_device_type(tensor.get(), &device_type),
        "aoti_torch_get_device_type");
  Check(shim::aoti_torch_get_device_index(tensor.get(), &device_index),
        "aoti_torch_get_device_index");
  view.ndim = static_cast<int32_t>(rank);
  view.dtype = numbers.DLPackDType(dtype);
  if (device_type == numbers.cpu) {
    view.device = {kDLCPU, 0};
  } else {
    view.device = {device_type == numbers.cuda ? kDLCUDA : kDLExtDev, device_index};
  }
  return view;
}

OwnedTensor AllocateBytes(DLDevice device, int64_t bytes) {
  const Numbers& numbers = Numbers::Get();
  const bool cuda = device.device_type == kDLCUDA;
  const int64_t stride = 1;
  shim::Tensor tensor = nullptr;
  try {
    Check(shim::aoti_torch_empty_strided(1, &bytes, &stride, numbers.TorchDType({kDLUInt, 8, 1}),
                                         cuda ? numbers.cuda : numbers.cpu,
                                         cuda ? device.device_id : 0, &tensor),
          "aoti_torch_empty_strided");
  } catch (const Failure& failure) {
    throw Failure(kOutOfMemoryError, Text(bytes, " bytes cannot be allocated: ", failure.what()));
  }
  return OwnedTensor(tensor);
}

OwnedTensor AllocateResult(const KernelSpec& spec, const DLTensor& a, const DLTensor& b,
                           int64_t count) {
  const int rank = spec.a_rank();
  if (a.ndim != rank || b.ndim != spec.b_rank()) {
    throw Failure(kValueError, Text("a and b have ", a.ndim, " and ", b.ndim,
                                    " dimensions; kernel ", ShortId(spec.id), " takes ", rank,
                                    " and ", spec.b_rank()));
  }
  const Numbers& numbers = Numbers::Get();
  const int64_t columns = spec.OutColumns(b.shape[spec.b_rank() - 1]);
  const int out_rank = spec.out_rank();
  const int64_t rows = spec.op == Op::kGatheredGroupedMm ? count : a.shape[rank - 2];
  int64_t sizes[3] = {out_rank > rank ? count : a.shape[0], rows, columns};
  // Like torch's strides, also for an empty tensor.
  const auto extent = [&](int at) { return sizes[at] > 0 ? sizes[at] : 1; };
  int64_t strides[3] = {extent(1) * extent(2), extent(2), 1};
  const int skip = 3 - out_rank;  // mm has no batch
  const bool cuda = a.device.device_type == kDLCUDA;
  shim::Tensor out = nullptr;
  Check(shim::aoti_torch_empty_strided(out_rank, sizes + skip, strides + skip,
                                       numbers.TorchDType(spec.out_dtype),
                                       cuda ? numbers.cuda : numbers.cpu,
                                       cuda ? a.device.device_id : 0, &out),
        "aoti_torch_empty_strided");
  return OwnedTensor(out);
}

void MarkWritten(const OwnedTensor& tensor) {
  // The ABI cannot increment a version, but swapping a dimension with itself does.
  shim::Tensor handle = nullptr;
  Check(shim::aoti_torch_new_tensor_handle(tensor.get(), &handle), "aoti_torch_new_tensor_handle");
  shim::Value stack[3] = {reinterpret_cast<shim::Value>(handle), 0, 0};
  Check(shim::torch_call_dispatcher("aten::transpose_", "", stack, shim::kBuildVersion),
        "check that out may be written to (an inference tensor may only in inference mode)");
  const OwnedTensor same(stack[0]);
}

void* CurrentCudaStream(int32_t device_index) {
  static std::atomic<shim::GetCurrentCudaStream> cached{nullptr};
  shim::GetCurrentCudaStream function = cached.load(std::memory_order_acquire);
  if (function == nullptr) {
    function =
        FindLoaded<shim::GetCurrentCudaStream>("libtorch_cuda.so", shim::kGetCurrentCudaStream);
  }
  if (function == nullptr) {
    throw Failure(kDriverError, Text("this torch has no ", shim::kGetCurrentCudaStream,
                                     " in libtorch_cuda.so; install a torch with CUDA"));
  }
  cached.store(function, std::memory_order_release);
  void* stream = nullptr;
  Check(function(device_index, &stream), shim::kGetCurrentCudaStream);
  return stream;
}

}  // namespace nvgemm
