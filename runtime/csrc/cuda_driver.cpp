#include "cuda_driver.h"

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <string>

#include "dynamic_loading.h"
#include "failure.h"

namespace nvgemm::cuda {
namespace {

// The driver's ABI, written out from cuda.h: CUresult is an int (0 is success), CUdevice an int,
// CUcontext and CUstream are pointers, CUdeviceptr is a 64-bit integer.
using Result = int;
using Address = unsigned long long;  // NOLINT(runtime/int): as cuda.h has it
constexpr int kCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kCapabilityMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr int64_t kMaxPitchBytes = (int64_t{1} << 31) - 1;  // CU_DEVICE_ATTRIBUTE_MAX_PITCH

constexpr Result kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED

constexpr int kMaxDevices = 64;

// Functions of libcuda.so.1. All are in every driver that CUDA 13 supports.
struct Driver {
  Result (*init)(unsigned flags);
  Result (*device_get)(int* device, int ordinal);
  Result (*device_get_attribute)(int* value, int attribute, int device);
  Result (*primary_context_retain)(void** context, int device);
  Result (*context_get_current)(void** context);
  Result (*context_set_current)(void* context);
  Result (*get_error_name)(Result error, const char** name);
  Result (*fill_async)(Address to, unsigned char value, size_t count, void* stream);
  Result (*fill_2d_async)(Address to, size_t pitch, unsigned char value, size_t width,
                          size_t height, void* stream);
};

void Check(const Driver& driver, Result result, const char* function) {
  if (result == 0) return;
  const char* name = nullptr;
  driver.get_error_name(result, &name);
  throw Failure(kDriverError, Text(function, " failed: ", name != nullptr ? name : "unknown error",
                                   " (", result, ")"));
}

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) {
    throw Failure(kDriverError, Text("libcuda.so.1 has no ", name,
                                     "; install a driver that supports CUDA 13"));
  }
}

Driver Open() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure(kDriverError, Text("cannot open the CUDA driver: ", dlerror()));
  }
  Driver driver;
  Find(library, "cuInit", &driver.init);
  Find(library, "cuDeviceGet", &driver.device_get);
  Find(library, "cuDeviceGetAttribute", &driver.device_get_attribute);
  Find(library, "cuDevicePrimaryCtxRetain", &driver.primary_context_retain);
  Find(library, "cuCtxGetCurrent", &driver.context_get_current);
  Find(library, "cuCtxSetCurrent", &driver.context_set_current);
  Find(library, "cuGetErrorName", &driver.get_error_name);
  Find(library, "cuMemsetD8Async", &driver.fill_async);
  Find(library, "cuMemsetD2D8Async", &driver.fill_2d_async);
  const Result result = driver.init(0);
  if (result == kNotInitialized) {
    throw Failure(kDriverError,
                  "cuInit failed: CUDA_ERROR_NOT_INITIALIZED (3), as it does in a process that was "
                  "forked from one that had used CUDA; start it with the 'spawn' start method of "
                  "multiprocessing");
  }
  Check(driver, result, "cuInit");
  return driver;
}

const Driver& GetDriver() {
  static const Driver driver = Open();  // has no destructor; a failure is tried again
  return driver;
}

int DeviceOf(int ordinal) {
  int device = 0;
  Check(GetDriver(), GetDriver().device_get(&device, ordinal), "cuDeviceGet");
  return device;
}

// The primary context, retained once a process and never released: torch's tensors live in it.
void* PrimaryContext(int ordinal) {
  static std::atomic<void*> contexts[kMaxDevices];
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    throw Failure(kDriverError, Text("tensors are on cuda:", ordinal, "; must be in 0..",
                                     kMaxDevices - 1));
  }
  void* context = contexts[ordinal].load(std::memory_order_acquire);
  if (context == nullptr) {
    Check(GetDriver(), GetDriver().primary_context_retain(&context, DeviceOf(ordinal)),
          "cuDevicePrimaryCtxRetain");
    contexts[ordinal].store(context, std::memory_order_release);
  }
  return context;
}

bool Allows(const ArchitectureRule& rule, int major, int minor) {
  if (rule.suffix == 'a') return major == rule.major && minor == rule.minor;
  if (rule.suffix == 'f') return major == rule.major && minor >= rule.minor;
  return major > rule.major || (major == rule.major && minor >= rule.minor);
}

enum class ForkState { kUnused, kUsed, kForked };
std::atomic<ForkState> fork_state{ForkState::kUnused};

}  // namespace

void RefuseForkedChild() {
  const ForkState state = fork_state.load(std::memory_order_acquire);
  if (state == ForkState::kUsed) return;
  if (state == ForkState::kForked) {
    throw Failure(kRuntimeError,
                  "cannot launch on CUDA in this process: it was forked from one that had launched "
                  "on CUDA; start it with the 'spawn' start method of multiprocessing");
  }
  // Registered before CUDA counts as used, so that no fork slips in between; perhaps by two threads
  // at once, which does no harm.
  const int error = pthread_atfork(nullptr, nullptr, [] {
    ForkState used = ForkState::kUsed;
    fork_state.compare_exchange_strong(used, ForkState::kForked);
  });
  if (error != 0) {
    throw Failure(kRuntimeError, Text("pthread_atfork failed: ", std::strerror(error)));
  }
  ForkState unused = ForkState::kUnused;
  fork_state.compare_exchange_strong(unused, ForkState::kUsed);
}

void CheckArchitecture(const KernelSpec& spec, int ordinal) {
  const Driver& driver = GetDriver();
  const int device = DeviceOf(ordinal);
  int major = 0;
  int minor = 0;
  Check(driver, driver.device_get_attribute(&major, kCapabilityMajor, device),
        "cuDeviceGetAttribute");
  Check(driver, driver.device_get_attribute(&minor, kCapabilityMinor, device),
        "cuDeviceGetAttribute");
  const ArchitectureRule& rule = spec.architecture;
  if (Allows(rule, major, minor)) return;
  const char suffix[2] = {rule.suffix, '\0'};
  throw Failure(kValueError,
                Text("kernel ", ShortId(spec.id), ": cuda:", ordinal,
                     " has compute capability ", major, ".", minor, "; a kernel for sm_",
                     rule.major, rule.minor, suffix, " runs on ",
                     rule.suffix == 'a'   ? "exactly "
                     : rule.suffix == 'f' ? "the same major version from "
                                          : "",
                     rule.major, ".", rule.minor, rule.suffix == '\0' ? " and newer" : "",
                     "; use a bundle for this GPU"));
}

DeviceGuard::DeviceGuard(int device) {
  const Driver& driver = GetDriver();
  void* const wanted = PrimaryContext(device);
  Check(driver, driver.context_get_current(&previous_), "cuCtxGetCurrent");
  if (previous_ != wanted) Check(driver, driver.context_set_current(wanted), "cuCtxSetCurrent");
}

DeviceGuard::~DeviceGuard() {
  const Driver& driver = GetDriver();
  void* current = nullptr;
  if (driver.context_get_current(&current) == 0 && current == previous_) return;
  driver.context_set_current(previous_);
}

void FillWithZeros(const TensorView& view, void* stream) {
  const Driver& driver = GetDriver();
  const int rank = view.tensor.ndim;
  const int64_t element_bytes = ElementBytes(view.tensor.dtype);
  const int64_t rows = view.shape[rank - 2];
  const int64_t pitch = view.strides[rank - 2] * element_bytes;
  const size_t width = static_cast<size_t>(view.shape[rank - 1] * element_bytes);
  const int64_t batch = rank == 3 ? view.shape[0] : 1;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t offset = rank == 3 ? i * view.strides[0] * element_bytes : 0;
    const Address matrix = reinterpret_cast<Address>(view.data() + offset);
    if (pitch <= kMaxPitchBytes) {
      Check(driver,
            driver.fill_2d_async(matrix, static_cast<size_t>(pitch), 0, width,
                                 static_cast<size_t>(rows), stream),
            "cuMemsetD2D8Async");
      continue;
    }
    for (int64_t row = 0; row < rows; ++row) {
      Check(driver, driver.fill_async(matrix + static_cast<Address>(row * pitch), 0, width, stream),
            "cuMemsetD8Async");
    }
  }
}

}  // namespace nvgemm::cuda
