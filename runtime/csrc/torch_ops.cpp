#include "torch_ops.h"

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "dynamic_loading.h"
#include "failure.h"
#include "ffi_error.h"
#include "kernel_table.h"
#include "launch.h"
#include "torch_shim.h"

namespace nvgemm {
namespace {

namespace shim = torch_shim;

// A function of a library that is loaded already; null if there is no such library or function.
template <typename Function>
Function FindLoaded(const char* library_name, const char* function_name) {
  void* library = dlopen(library_name, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<Function>(dlsym(library, function_name));
}

void Check(shim::Error error, const char* function) {
  if (error == 0) return;
  const auto text = FindLoaded<shim::GetExceptionText>("libtorch_cpu.so", shim::kGetExceptionText);
  throw Failure(kRuntimeError, Text("torch's ", function, " failed: ",
                                    text != nullptr ? text() : "see torch's message on stderr"));
}

// An owning handle of torch.
template <typename Handle, shim::Error (*Delete)(Handle)>
class Owned {
 public:
  explicit Owned(Handle handle) : handle_(handle) {}
  explicit Owned(shim::Value value) : handle_(reinterpret_cast<Handle>(value)) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&&) = delete;
  ~Owned() {
    if (handle_ != nullptr) Delete(handle_);
  }

  Handle get() const { return handle_; }
  shim::Value Release() { return reinterpret_cast<shim::Value>(std::exchange(handle_, nullptr)); }

 private:
  Handle handle_;
};

using OwnedTensor = Owned<shim::Tensor, shim::aoti_torch_delete_tensor_object>;
using OwnedString = Owned<shim::String, shim::torch_delete_string>;

std::string_view ViewOf(const OwnedString& string) {
  const char* text = nullptr;
  size_t length = 0;
  Check(shim::torch_string_c_str(string.get(), &text), "torch_string_c_str");
  Check(shim::torch_string_length(string.get(), &length), "torch_string_length");
  return {text, length};
}

// torch's numbers of device types and dtypes, which are not part of its ABI.
struct Numbers {
  struct DType {
    int32_t torch;
    DLDataType dlpack;
  };

  const int32_t cpu = shim::aoti_torch_device_type_cpu();
  const int32_t cuda = shim::aoti_torch_device_type_cuda();
  const DType dtypes[8] = {
      {shim::aoti_torch_dtype_bfloat16(), {kDLBfloat, 16, 1}},
      {shim::aoti_torch_dtype_float16(), {kDLFloat, 16, 1}},
      {shim::aoti_torch_dtype_float32(), {kDLFloat, 32, 1}},
      {shim::aoti_torch_dtype_float8_e4m3fn(), {kDLFloat8_e4m3fn, 8, 1}},
      {shim::aoti_torch_dtype_float8_e5m2(), {kDLFloat8_e5m2, 8, 1}},
      {shim::aoti_torch_dtype_int8(), {kDLInt, 8, 1}},
      {shim::aoti_torch_dtype_uint8(), {kDLUInt, 8, 1}},
      {shim::aoti_torch_dtype_int32(), {kDLInt, 32, 1}},
  };

  static const Numbers& Get() {
    static const Numbers numbers;
    return numbers;
  }

  DLDataType DLPackDType(int32_t torch) const {
    for (const DType& dtype : dtypes) {
      if (dtype.torch == torch) return dtype.dlpack;
    }
    return {static_cast<uint8_t>(kDLOpaqueHandle), 0, 0};  // equals no kernel's dtype
  }

  int32_t TorchDType(DLDataType dlpack) const {
    for (const DType& dtype : dtypes) {
      if (dtype.dlpack.code == dlpack.code && dtype.dlpack.bits == dlpack.bits) return dtype.torch;
    }
    throw Failure(kTypeError, Text("torch has no dtype for DLPack code ", dlpack.code, ", ",
                                   dlpack.bits, " bits"));
  }
};

// A view of a tensor; its shape and strides are the tensor's own.
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

// The operators have no derivative. torch would warn only when backward() runs, and leave the
// gradients out; the ABI has no getter of requires_grad, but an alias of such a tensor, made while
// gradients are recorded, is not a leaf.
void RefuseGradient(const char* name, const OwnedTensor& tensor) {
  shim::Tensor alias = nullptr;
  Check(shim::aoti_torch_new_tensor_handle(tensor.get(), &alias), "aoti_torch_new_tensor_handle");
  shim::Value stack[1] = {reinterpret_cast<shim::Value>(alias)};
  for (const char* op : {"aten::alias", "aten::is_leaf"}) {
    Check(shim::torch_call_dispatcher(op, "", stack, shim::kBuildVersion), op);
  }
  if ((stack[0] & 0xff) != 0) return;  // is_leaf: a bool in the lowest byte
  throw Failure(kRuntimeError, Text(name, " requires grad, and the operator has no derivative; call "
                                          "it under torch.no_grad() or detach ", name));
}

// Tells autograd that the operator wrote to `tensor`, so that backward() refuses to use a value that
// was saved before. The ABI cannot count a version up, but zeroing an empty view does.
void MarkWritten(const OwnedTensor& tensor) {
  constexpr int64_t kNone[3] = {0, 0, 0};
  shim::Tensor view = nullptr;
  Check(shim::aoti_torch_as_strided(tensor.get(), kNone, kNone, &view), "aoti_torch_as_strided");
  const OwnedTensor empty(view);
  Check(shim::aoti_torch_zero_(empty.get()), "aoti_torch_zero_");
}

// torch's current stream as the one of TVM-FFI's environment, from which kernels take theirs.
class StreamScope {
 public:
  explicit StreamScope(DLDevice device) : device_(device) {
    if (device.device_type != kDLCUDA) return;
    void* stream = nullptr;
    Check(GetCurrentStream()(device.device_id, &stream), shim::kGetCurrentCudaStream);
    if (TVMFFIEnvSetStream(kDLCUDA, device.device_id, stream, &previous_) != 0) {
      throw TakeRaisedError("launch");
    }
  }
  ~StreamScope() {
    if (device_.device_type != kDLCUDA) return;
    TVMFFIEnvSetStream(kDLCUDA, device_.device_id, previous_, nullptr);
  }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  static shim::GetCurrentCudaStream GetCurrentStream() {
    static std::atomic<shim::GetCurrentCudaStream> found{nullptr};
    auto function = found.load(std::memory_order_acquire);
    if (function != nullptr) return function;
    function =
        FindLoaded<shim::GetCurrentCudaStream>("libtorch_cuda.so", shim::kGetCurrentCudaStream);
    if (function == nullptr) {
      throw Failure(kDriverError, Text("this torch has no ", shim::kGetCurrentCudaStream,
                                       " in libtorch_cuda.so; install a torch with CUDA"));
    }
    found.store(function, std::memory_order_release);
    return function;
  }

  const DLDevice device_;
  TVMFFIStreamHandle previous_ = nullptr;
};

// A row-major tensor for the result, on the device of `a`.
OwnedTensor Allocate(const KernelSpec& spec, const DLTensor& a, const DLTensor& b) {
  if (a.ndim != spec.rank || b.ndim != spec.rank) {
    throw Failure(kValueError, Text("a and b have ", a.ndim, " and ", b.ndim,
                                    " dimensions; kernel ", spec.id, " takes ", spec.rank));
  }
  const Numbers& numbers = Numbers::Get();
  const int last = spec.rank - 1;
  int64_t sizes[3] = {a.shape[0], a.shape[last - 1], b.shape[last]};
  int64_t strides[3] = {sizes[1] * sizes[2], sizes[2], 1};
  const int skip = 3 - spec.rank;  // mm has no batch
  const bool cuda = a.device.device_type == kDLCUDA;
  shim::Tensor out = nullptr;
  Check(shim::aoti_torch_empty_strided(spec.rank, sizes + skip, strides + skip,
                                       numbers.TorchDType(spec.out_dtype),
                                       cuda ? numbers.cuda : numbers.cpu,
                                       cuda ? a.device.device_id : 0, &out),
        "aoti_torch_empty_strided");
  return OwnedTensor(out);
}

template <int kRank>
Kernel* KernelFor(const OwnedString& id) {
  Kernel* kernel = FindOrLoadKernel(ViewOf(id));
  if (kernel->spec.rank != kRank) {
    throw Failure(kValueError, Text("kernel ", kernel->spec.id, " is for ",
                                    kernel->spec.rank == 2 ? "mm" : "bmm", ", not for ",
                                    kRank == 2 ? "mm" : "bmm"));
  }
  return kernel;
}

// Runs a body and, after everything it owned is gone, fails as torch's kernels do: by torch's own
// exception, thrown by torch.
template <typename Body>
void Guarded(const char* op, const Body& body) {
  std::string message;
  try {
    return body();
  } catch (const std::exception& error) {
    message = Text(op, ": ", error.what());
  }
  shim::aoti_torch_check(false, op, __FILE__, __LINE__, message.c_str());
}

template <int kRank>
void Functional(shim::Value* stack, uint64_t, uint64_t) {
  Guarded(kRank == 2 ? "nvgemm_aot::mm" : "nvgemm_aot::bmm", [stack] {
    const OwnedTensor a(stack[0]);
    const OwnedTensor b(stack[1]);
    const OwnedString id(stack[2]);
    if (shim::aoti_torch_grad_mode_is_enabled()) {
      RefuseGradient("a", a);
      RefuseGradient("b", b);
    }
    Kernel* kernel = KernelFor<kRank>(id);
    const DLTensor a_view = ViewOf(a);
    const DLTensor b_view = ViewOf(b);
    OwnedTensor out = Allocate(kernel->spec, a_view, b_view);
    const StreamScope scope(a_view.device);
    Launch(kernel, a_view, b_view, ViewOf(out));
    stack[0] = out.Release();
  });
}

template <int kRank>
void Out(shim::Value* stack, uint64_t, uint64_t) {
  Guarded(kRank == 2 ? "nvgemm_aot::mm.out" : "nvgemm_aot::bmm.out", [stack] {
    const OwnedTensor a(stack[0]);
    const OwnedTensor b(stack[1]);
    const OwnedString id(stack[2]);
    const OwnedTensor out(stack[3]);
    const bool records_gradients = shim::aoti_torch_grad_mode_is_enabled();
    if (records_gradients) {
      RefuseGradient("a", a);
      RefuseGradient("b", b);
      RefuseGradient("out", out);
    }
    const DLTensor a_view = ViewOf(a);
    const StreamScope scope(a_view.device);
    Launch(KernelFor<kRank>(id), a_view, ViewOf(b), ViewOf(out));
    if (records_gradients) MarkWritten(out);
  });
}

void Abi(shim::Value* stack, uint64_t, uint64_t) { stack[0] = static_cast<shim::Value>(kAbi); }

constexpr char kNamespace[] = "nvgemm_aot";

// The out forms return nothing: torch cannot functionalize a custom operator that returns an alias
// of an argument, so torch.compile would refuse them.
constexpr const char* kSchemas[] = {
    "mm(Tensor a, Tensor b, str kernel) -> Tensor",
    "mm.out(Tensor a, Tensor b, str kernel, *, Tensor(a!) out) -> ()",
    "bmm(Tensor a, Tensor b, str kernel) -> Tensor",
    "bmm.out(Tensor a, Tensor b, str kernel, *, Tensor(a!) out) -> ()",
    "abi() -> int",
};

struct Implementation {
  const char* name;
  shim::BoxedKernel kernel;
};

constexpr Implementation kDeviceImplementations[] = {
    {"mm", Functional<2>},
    {"mm.out", Out<2>},
    {"bmm", Functional<3>},
    {"bmm.out", Out<3>},
};

constexpr Implementation kAbiImplementation = {"abi", Abi};

void Implement(shim::Library library, const Implementation& implementation) {
  Check(shim::torch_library_impl(library, implementation.name, implementation.kernel,
                                 shim::kBuildVersion),
        "torch_library_impl");
}

// Library objects are never deleted: that would take the operators away while torch may hold them.
shim::Library ImplementationLibrary(const char* dispatch_key) {
  shim::Library library = nullptr;
  Check(shim::aoti_torch_library_init_impl(kNamespace, dispatch_key, __FILE__, __LINE__, &library),
        "aoti_torch_library_init_impl");
  return library;
}

void Register() {
  shim::Library definitions = nullptr;
  Check(shim::aoti_torch_library_init_fragment(kNamespace, __FILE__, __LINE__, &definitions),
        "aoti_torch_library_init_fragment");
  for (const char* schema : kSchemas) {
    Check(shim::aoti_torch_library_def(definitions, schema), "aoti_torch_library_def");
  }
  for (const char* key : {"CPU", "CUDA"}) {
    const shim::Library library = ImplementationLibrary(key);
    for (const Implementation& implementation : kDeviceImplementations) {
      Implement(library, implementation);
    }
  }
  // Serves calls without tensors, which have no device to dispatch on.
  Implement(ImplementationLibrary("CompositeExplicitAutograd"), kAbiImplementation);
}

}  // namespace

void RegisterTorchOps() {
  static const bool registered = [] {
    Register();
    return true;
  }();
  static_cast<void>(registered);
}

}  // namespace nvgemm
