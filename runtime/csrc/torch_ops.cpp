#include "torch_ops.h"

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <string>

#include "failure.h"
#include "ffi_error.h"
#include "kernel_table.h"
#include "launch.h"
#include "torch_shim.h"
#include "torch_values.h"

namespace nvgemm {
namespace {

namespace shim = torch_shim;

// torch's current stream as the one of TVM-FFI's environment, from which kernels take theirs.
class StreamScope {
 public:
  explicit StreamScope(DLDevice device) : device_(device) {
    if (device.device_type != kDLCUDA) return;
    void* const stream = CurrentCudaStream(device.device_id);
    if (TVMFFIEnvSetStream(kDLCUDA, device.device_id, stream, &previous_) != 0) {
      throw TakeRaisedError("setting the stream of the launch");
    }
  }
  ~StreamScope() {
    if (device_.device_type != kDLCUDA) return;
    TVMFFIEnvSetStream(kDLCUDA, device_.device_id, previous_, nullptr);
  }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  const DLDevice device_;
  TVMFFIStreamHandle previous_ = nullptr;
};

template <int kRank>
Kernel* KernelFor(const OwnedString& id) {
  Kernel* kernel = FindOrLoadKernel(ViewOf(id));
  if (kernel->spec.rank != kRank) {
    throw Failure(kValueError, Text("kernel ", ShortId(kernel->spec.id), " is for ",
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
    Kernel* kernel = KernelFor<kRank>(id);
    const DLTensor a_view = ViewOf(a);
    const DLTensor b_view = ViewOf(b);
    OwnedTensor out = AllocateResult(kernel->spec, a_view, b_view);
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
    const DLTensor a_view = ViewOf(a);
    const StreamScope scope(a_view.device);
    Kernel* kernel = KernelFor<kRank>(id);
    MarkWritten(out);  // first, for torch may refuse it
    Launch(kernel, a_view, ViewOf(b), ViewOf(out));
  });
}

constexpr int64_t kMissing = -1;

// The handle of a kernel that code was compiled for, or kMissing.
void Prepare(shim::Value* stack, uint64_t, uint64_t) {
  Guarded("nvgemm_aot::prepare", [stack] {
    const OwnedString id(stack[0]);
    const OwnedString origin(stack[1]);
    const Kernel* kernel = FindOrPrepareKernel(ViewOf(id), ViewOf(origin));
    stack[0] = static_cast<shim::Value>(kernel == nullptr ? kMissing : kernel->handle);
  });
}

// Whether out = a @ b could be computed by the kernel of a handle; nothing was done if not.
void TryGemm(shim::Value* stack, uint64_t, uint64_t) {
  Guarded("nvgemm_aot::try_gemm", [stack] {
    const OwnedTensor a(stack[0]);
    const OwnedTensor b(stack[1]);
    const OwnedTensor out(stack[3]);
    Kernel* kernel = KernelOfHandle(static_cast<int64_t>(stack[2]));
    const DLTensor a_view = ViewOf(a);
    const StreamScope scope(a_view.device);
    stack[0] = TryLaunch(kernel, a_view, ViewOf(b), ViewOf(out));
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
    "prepare(str kernel, str origin) -> int",
    "try_gemm(Tensor a, Tensor b, int kernel, *, Tensor(a!) out) -> bool",
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
    {"try_gemm", TryGemm},
};

// Without tensors there is no device to dispatch on.
constexpr Implementation kOtherImplementations[] = {{"prepare", Prepare}, {"abi", Abi}};

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

std::atomic<int64_t> registered_abi{0};

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
  const shim::Library library = ImplementationLibrary("CompositeExplicitAutograd");
  for (const Implementation& implementation : kOtherImplementations) {
    Implement(library, implementation);
  }
}

}  // namespace

void RegisterTorchOps() {
  static const bool registered = [] {
    Register();
    registered_abi.store(kAbi, std::memory_order_release);
    return true;
  }();
  static_cast<void>(registered);
}

int64_t RegisteredAbi() { return registered_abi.load(std::memory_order_acquire); }

}  // namespace nvgemm
