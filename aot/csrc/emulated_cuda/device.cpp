#include "device.h"

#include <set>

namespace nvgemm::emulated {
namespace {

// All below are guarded by StateMutex.
constexpr int kMostDevices = 64;
Device devices[kMostDevices];
Context contexts[kMostDevices];
int device_count = 0;
Result (*on_launch)(const Launch*);
int (*static_shared_bytes)(const void* image, const char* kernel);
std::set<std::string> unsupported;
std::string unsupported_text;

}  // namespace

std::mutex& StateMutex() {
  static std::mutex mutex;
  return mutex;
}

Device* DeviceAt(int ordinal) {
  if (ordinal < 0 || ordinal >= DeviceCount()) return nullptr;
  return &devices[ordinal];
}

int DeviceCount() { return device_count; }

Context* PrimaryContext(int ordinal) {
  if (DeviceAt(ordinal) == nullptr) return nullptr;
  return &contexts[ordinal];
}

Context*& CurrentContext() {
  thread_local Context* current = nullptr;
  return current;
}

Result SetKernelAttribute(void* kernel, int attribute, int value) {
  if (kernel == nullptr) return kInvalidHandle;
  const std::lock_guard<std::mutex> lock(StateMutex());
  static_cast<Kernel*>(kernel)->attributes[attribute] = value;
  return kSuccess;
}

Result RunLaunch(const void* handle, const RuntimeLaunch& config, void* const* parameters) {
  auto* const kernel = static_cast<const Kernel*>(handle);
  if (kernel == nullptr || kernel->library == nullptr) return kInvalidHandle;
  Launch launch{};
  Result (*run)(const Launch*) = nullptr;
  {
    const std::lock_guard<std::mutex> lock(StateMutex());
    // As the CUDA runtime does, a thread without a context gets the first device's.
    if (CurrentContext() == nullptr) CurrentContext() = PrimaryContext(0);
    if (CurrentContext() == nullptr) return kNoDevice;
    const auto attribute = [kernel](int id) {
      const auto found = kernel->attributes.find(id);
      return found == kernel->attributes.end() ? 0 : found->second;
    };
    launch.image = kernel->library->image;
    launch.kernel = kernel->name.c_str();
    for (int i = 0; i < 3; ++i) {
      launch.grid[i] = config.grid[i];
      launch.block[i] = config.block[i];
    }
    launch.shared_bytes = config.shared_bytes;
    launch.attributes = config.attributes;
    launch.attribute_count = config.attribute_count;
    launch.device = CurrentContext()->device;
    launch.most_shared_bytes = attribute(kMaxDynamicShared);
    launch.allows_big_clusters = attribute(kBigClusters);
    launch.parameters = parameters;
    run = on_launch;
  }
  return run == nullptr ? Unsupported("a launch, without a callback for launches") : run(&launch);
}

int StaticSharedBytes(const Kernel& kernel) {
  int (*read)(const void*, const char*) = nullptr;
  {
    const std::lock_guard<std::mutex> lock(StateMutex());
    read = static_shared_bytes;
  }
  return read == nullptr ? -1 : read(kernel.library->image, kernel.name.c_str());
}

const char* ErrorName(Result error) {
  switch (error) {
    case kSuccess: return "CUDA_SUCCESS";
    case kInvalidValue: return "CUDA_ERROR_INVALID_VALUE";
    case kNoDevice: return "CUDA_ERROR_NO_DEVICE";
    case kInvalidDevice: return "CUDA_ERROR_INVALID_DEVICE";
    case kInvalidContext: return "CUDA_ERROR_INVALID_CONTEXT";
    case kInvalidPtx: return "CUDA_ERROR_INVALID_PTX";
    case kInvalidHandle: return "CUDA_ERROR_INVALID_HANDLE";
    case kNotFound: return "CUDA_ERROR_NOT_FOUND";
    case kLaunchFailed: return "CUDA_ERROR_LAUNCH_FAILED";
    case kNotSupported: return "CUDA_ERROR_NOT_SUPPORTED";
    case kInvalidClusterSize: return "CUDA_ERROR_INVALID_CLUSTER_SIZE";
    default: return "an error that the emulated driver does not have";
  }
}

Result Unsupported(const char* name) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  unsupported.insert(name);
  return kNotSupported;
}

}  // namespace nvgemm::emulated

using namespace nvgemm::emulated;  // NOLINT(build/namespaces): what follows has C linkage

// Adds a device after the others, without attributes, and returns its ordinal, or -1 if there are
// too many.
NVGEMM_EXPORT int nvgemm_emulated_add_device() {
  const std::lock_guard<std::mutex> lock(StateMutex());
  if (device_count == kMostDevices) return -1;
  contexts[device_count].device = device_count;
  return device_count++;
}

// Sets a CUdevice_attribute.
NVGEMM_EXPORT void nvgemm_emulated_set_attribute(int ordinal, int attribute, int value) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  DeviceAt(ordinal)->attributes[attribute] = value;
}

// Sets the number of clusters that run at once, for a size in thread blocks.
NVGEMM_EXPORT void nvgemm_emulated_set_clusters(int ordinal, int size, int clusters) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  DeviceAt(ordinal)->clusters[size] = clusters;
}

// Sets the function that executes launches, whose result is the launch's, and the one for
// `StaticSharedBytes`.
NVGEMM_EXPORT void nvgemm_emulated_set_callbacks(Result (*launch)(const Launch*),
                                                 int (*shared_bytes)(const void*, const char*)) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  on_launch = launch;
  static_shared_bytes = shared_bytes;
}

// Returns the functions that were called or asked for in vain, one a line; valid until the next
// call.
NVGEMM_EXPORT const char* nvgemm_emulated_unsupported() {
  const std::lock_guard<std::mutex> lock(StateMutex());
  unsupported_text.clear();
  for (const std::string& name : unsupported) unsupported_text += name + "\n";
  return unsupported_text.c_str();
}
