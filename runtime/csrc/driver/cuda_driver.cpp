#include "driver/cuda_driver.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "driver/dynamic_loading.h"
#include "core/failure.h"

namespace nvgemm::cuda {
namespace {

// Driver ABI, copied from cuda.h: CUresult is an int (0 is success), CUdevice an int, CUcontext and
// CUstream are pointers, CUdeviceptr is a 64-bit integer.
using Result = int;
using Address = unsigned long long;  // NOLINT(runtime/int): as in cuda.h
constexpr int kCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kCapabilityMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr int64_t kMaxPitchBytes = (int64_t{1} << 31) - 1;  // CU_DEVICE_ATTRIBUTE_MAX_PITCH

constexpr Result kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED

constexpr int kMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kSharedPerBlock = 97;   // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

constexpr int kMaxDevices = 64;

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    unsigned cluster[3];
  } value;
};
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
constexpr int kMaxClusterSize = 16;   // with kBigClusters; else 8
constexpr int kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kBigClusters = 14;      // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kRelaxedCapture = 2;    // CU_STREAM_CAPTURE_MODE_RELAXED

// Functions in libcuda.so.1. Every driver that CUDA 12 supports has them: the newest came with CUDA
// 11.8.
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
  Result (*exchange_capture_mode)(int* mode);
  Result (*module_load_data)(void** module, const void* image);
  Result (*module_unload)(void* module);
  Result (*module_get_function)(void** function, void* module, const char* name);
  Result (*function_set_attribute)(void* function, int attribute, int value);
  Result (*max_active_clusters)(int* clusters, void* function, const LaunchConfig* config);
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
                                     "; install a driver that supports torch's CUDA"));
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
  Find(library, "cuThreadExchangeStreamCaptureMode", &driver.exchange_capture_mode);
  Find(library, "cuModuleLoadData", &driver.module_load_data);
  Find(library, "cuModuleUnload", &driver.module_unload);
  Find(library, "cuModuleGetFunction", &driver.module_get_function);
  Find(library, "cuFuncSetAttribute", &driver.function_set_attribute);
  Find(library, "cuOccupancyMaxActiveClusters", &driver.max_active_clusters);
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
  static const Driver driver = Open();  // has no destructor; retried after a failure
  return driver;
}

int DeviceOf(int ordinal) {
  int device = 0;
  Check(GetDriver(), GetDriver().device_get(&device, ordinal), "cuDeviceGet");
  return device;
}

// Returns the primary context, retained once per process and never released: torch's tensors live
// in it.
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

int AttributeOf(int ordinal, int attribute) {
  int value = 0;
  Check(GetDriver(), GetDriver().device_get_attribute(&value, attribute, DeviceOf(ordinal)),
        "cuDeviceGetAttribute");
  return value;
}

// An empty kernel, compiled by the driver: occupancy queries need a function, and the library that
// launches the real kernels does not expose theirs.
constexpr char kEmptyKernel[] =
    ".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n";

// Allows loading a module in a thread that captures a graph, where it is otherwise forbidden; the
// calls are not part of the graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { GetDriver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { GetDriver().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kRelaxedCapture;
};

// Returns the driver's answer, or 0 without one: it may lack the PTX compiler.
int QueryClusters(int ordinal, int cluster_size) {
  const Driver& driver = GetDriver();
  const RelaxedCapture relaxed;
  void* module = nullptr;
  if (driver.module_load_data(&module, kEmptyKernel) != 0) return 0;
  const int shared_bytes = AttributeOf(ordinal, kSharedPerBlock);
  LaunchAttribute attribute{};
  attribute.id = kClusterDimension;
  const unsigned size = static_cast<unsigned>(cluster_size);
  attribute.value.cluster[0] = size;
  attribute.value.cluster[1] = attribute.value.cluster[2] = 1;
  const LaunchConfig config{{size, 1, 1}, {128, 1, 1}, static_cast<unsigned>(shared_bytes),
                            nullptr,      &attribute,  1};
  void* function = nullptr;
  int clusters = 0;
  const bool succeeded =
      driver.module_get_function(&function, module, "nothing") == 0 &&
      driver.function_set_attribute(function, kMaxDynamicShared, shared_bytes) == 0 &&
      (cluster_size <= 8 || driver.function_set_attribute(function, kBigClusters, 1) == 0) &&
      driver.max_active_clusters(&clusters, function, &config) == 0;
  driver.module_unload(module);
  return succeeded ? clusters : 0;
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
  // Registered before CUDA counts as used, so that no fork slips in between. Two threads may both
  // register it, which is harmless.
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
  void* const context = PrimaryContext(device);
  Check(driver, driver.context_get_current(&previous_), "cuCtxGetCurrent");
  if (previous_ != context) Check(driver, driver.context_set_current(context), "cuCtxSetCurrent");
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

void FillBytesWithZeros(void* data, int64_t bytes, void* stream) {
  const Driver& driver = GetDriver();
  Check(driver,
        driver.fill_async(reinterpret_cast<Address>(data), 0, static_cast<size_t>(bytes), stream),
        "cuMemsetD8Async");
}

int64_t ClustersAtOnce(int device, int cluster_size) {
  static std::atomic<int> clusters_at_once[kMaxDevices][kMaxClusterSize + 1];
  if (device < 0 || device >= kMaxDevices || cluster_size < 1 || cluster_size > kMaxClusterSize) {
    throw Failure(kValueError, Text("clusters of ", cluster_size, " thread blocks on cuda:", device,
                                    "; must be of 1..", kMaxClusterSize, " on a device in 0..",
                                    kMaxDevices - 1));
  }
  std::atomic<int>& slot = clusters_at_once[device][cluster_size];
  int clusters = slot.load(std::memory_order_relaxed);
  if (clusters == 0) {
    const int multiprocessors = AttributeOf(device, kMultiprocessors);
    if (cluster_size > 1) clusters = QueryClusters(device, cluster_size);
    // An overestimate is slower but correct: excess clusters wait for the others.
    if (clusters == 0) clusters = std::max(1, multiprocessors / cluster_size);
    slot.store(clusters, std::memory_order_relaxed);
  }
  return clusters;
}

}  // namespace nvgemm::cuda
