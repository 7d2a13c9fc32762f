#include "core/launch.h"

#include <pthread.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <string_view>

#include "core/argument_list.h"
#include "checks/check.h"
#include "driver/cuda_driver.h"
#include "core/failure.h"
#include "ffi/ffi_error.h"

namespace nvgemm {
namespace {

// a, b, out and the CUDA stream.
constexpr int kPlainParameters = 4;

void Invoke(const KernelSpec& spec, const TVMFFIAny* arguments, int count) {
  TVMFFIAny result{};
  result.type_index = kTVMFFINone;
  if (spec.function(nullptr, arguments, count, &result) != 0) {
    throw TakeRaisedError(Text("kernel ", ShortId(spec.id)));
  }
  ReleaseResult(result);
}

// Invoke or InvokeForTheFirstTime.
using Invoker = void (*)(const KernelSpec&, const TVMFFIAny*, int);

// Separate, so that Call stays small.
template <Invoker kInvoke>
[[gnu::noinline]] void CallByConvention(const KernelSpec& spec, CheckedCall* call,
                                        TVMFFIStreamHandle stream) {
  const ArgumentList arguments(spec, call, stream);
  kInvoke(spec, arguments.data(), arguments.size());
}

template <Invoker kInvoke>
void Call(const KernelSpec& spec, CheckedCall* call, TVMFFIStreamHandle stream) {
  if (!spec.is_plain) return CallByConvention<kInvoke>(spec, call, stream);
  TVMFFIAny arguments[kPlainParameters] = {};
  constexpr Role kTensors[] = {Role::kA, Role::kB, Role::kOut};
  for (int i = 0; i < 3; ++i) {
    arguments[i].type_index = kTVMFFIDLTensorPtr;
    arguments[i].v_ptr = &(*call)[kTensors[i]].tensor;
  }
  arguments[3].type_index = kTVMFFIOpaquePtr;
  arguments[3].v_ptr = stream;
  kInvoke(spec, arguments, kPlainParameters);
}

// A kernel's first call makes libcute_dsl_runtime.so load its device code, under one lock for all
// kernels. Releases before 4.8 keep that lock after a failure, and wait for it forever at the next
// kernel. With these, nothing more is loaded after a failure.
std::atomic<bool> library_keeps_lock{false};
std::mutex loading;          // keeps threads from waiting for a lost lock; see RenewLock
bool lock_is_lost = false;   // guarded by loading

// A thread that the forked child does not have may hold the mutex.
void RenewLock() { new (&loading) std::mutex(); }

// Registered while this library loads, before any thread can lock it.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, RenewLock);

bool IsRefusal(const Failure& failure) {
  const std::string_view kind = failure.kind();
  return kind == kValueError || kind == kTypeError;
}

// Failures before it, such as in allocating a workspace, do not affect the lock.
void InvokeForTheFirstTime(const KernelSpec& spec, const TVMFFIAny* arguments, int count) {
  if (!library_keeps_lock.load(std::memory_order_relaxed)) return Invoke(spec, arguments, count);
  const std::lock_guard<std::mutex> lock(loading);
  if (lock_is_lost) {
    throw Failure(kDriverError,
                  Text("kernel ", ShortId(spec.id),
                       " cannot be loaded: a kernel failed to load in this process, and "
                       "libcute_dsl_runtime.so before 4.8 loads none after that; run: "
                       "pip install 'nvidia-cutlass-dsl-libs-cu13>=4.8,<4.9', or with torch for CUDA 12: "
                       "pip install 'nvidia-cutlass-dsl-libs-cu12>=4.8,<4.9'"));
  }
  try {
    Invoke(spec, arguments, count);
  } catch (const Failure& failure) {
    lock_is_lost = !IsRefusal(failure);
    throw;
  }
}

void Run(Kernel* kernel, CheckedCall* call, TVMFFIStreamHandle stream) {
  const int device = (*call)[Role::kA].tensor.device.device_id;
  const uint64_t bit = device >= 0 && device < 64 ? uint64_t{1} << device : 0;
  if ((kernel->ready_devices.load(std::memory_order_acquire) & bit) != 0) {
    return Call<Invoke>(kernel->spec, call, stream);
  }
  const std::lock_guard<std::mutex> lock(kernel->first_use);
  if (kernel->spec.device_type == kDLCUDA) cuda::CheckArchitecture(kernel->spec, device);
  if (kernel->ready_devices.load(std::memory_order_acquire) == 0) {
    Call<InvokeForTheFirstTime>(kernel->spec, call, stream);
  } else {
    Call<Invoke>(kernel->spec, call, stream);
  }
  kernel->ready_devices.fetch_or(bit, std::memory_order_release);
}

void FillWithZerosOnCpu(const TensorView& view) {
  const int rank = view.tensor.ndim;
  const int64_t element_bytes = ElementBytes(view.tensor.dtype);
  const int64_t batch = rank == 3 ? view.shape[0] : 1;
  for (int64_t i = 0; i < batch; ++i) {
    char* const matrix = view.data() + (rank == 3 ? i * view.strides[0] * element_bytes : 0);
    for (int64_t row = 0; row < view.shape[rank - 2]; ++row) {
      std::memset(matrix + row * view.strides[rank - 2] * element_bytes, 0,
                  static_cast<size_t>(view.shape[rank - 1] * element_bytes));
    }
  }
}

void LaunchChecked(Kernel* kernel, CheckedCall* call) {
  if (call->out_is_empty) return;
  const TensorView& out = (*call)[Role::kOut];
  if (kernel->spec.device_type == kDLCPU) {
    if (call->sum_is_empty) return FillWithZerosOnCpu(out);
    return Run(kernel, call, nullptr);
  }
  cuda::RefuseForkedChild();
  const int device = out.tensor.device.device_id;
  const cuda::DeviceGuard guard(device);
  const TVMFFIStreamHandle stream = TVMFFIEnvGetStream(kDLCUDA, device);
  if (call->sum_is_empty) return cuda::FillWithZeros(out, stream);
  Run(kernel, call, stream);
}

}  // namespace

void SetLibraryKeepsLock(bool keeps) {
  library_keeps_lock.store(keeps, std::memory_order_relaxed);
}

void Launch(Kernel* kernel, const Operands& operands) {
  CheckedCall call;
  CheckOperands(kernel->spec, operands, &call);
  LaunchChecked(kernel, &call);
}

bool TryLaunch(Kernel* kernel, const Operands& operands) {
  CheckedCall call;
  if (!OperandsPass(kernel->spec, operands, &call)) return false;
  try {
    LaunchChecked(kernel, &call);
  } catch (const Failure& failure) {
    // The kernel does not run on this device, or rejects an operand itself.
    if (!IsRefusal(failure)) throw;
    return false;
  }
  return true;
}

bool TryServe(Kernel* kernel, const Operands& operands) {
  if (kernel->is_given_up.load(std::memory_order_relaxed)) return false;
  try {
    return TryLaunch(kernel, operands);
  } catch (const Failure& failure) {
    if (std::string_view(failure.kind()) != kOutOfMemoryError) {
      const bool has_run = kernel->ready_devices.load(std::memory_order_acquire) != 0;
      if (has_run) throw;
      kernel->is_given_up.store(true, std::memory_order_relaxed);
    }
    ReportFailure(*kernel, failure);
    return false;
  }
}

}  // namespace nvgemm
