// The CUDA driver's functions that this project's launcher calls, for emulated devices whose memory
// is the host's.

#include <cstring>
#include <utility>

#include "device.h"

using namespace nvgemm::emulated;  // NOLINT(build/namespaces): all below has C linkage

// Counters that tests read, and what they make fail.
extern "C" {
#pragma GCC visibility push(default)
int nvgemm_emulated_memsets;
int nvgemm_emulated_modules;  // loaded ones
int nvgemm_emulated_occupancy_questions;
int nvgemm_emulated_init_result;
int nvgemm_emulated_rejects_ptx;
void* nvgemm_emulated_last_stream;
#pragma GCC visibility pop
}

NVGEMM_EXPORT Result cuInit(unsigned) {
  if (nvgemm_emulated_init_result != 0) return nvgemm_emulated_init_result;
  const std::lock_guard<std::mutex> lock(StateMutex());
  return DeviceCount() == 0 ? kNoDevice : kSuccess;
}

NVGEMM_EXPORT Result cuGetErrorName(Result error, const char** name) {
  *name = ErrorName(error);
  return kSuccess;
}

NVGEMM_EXPORT Result cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  if (DeviceAt(ordinal) == nullptr) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

// Attributes that nobody set are 0, which stands for "no" or "none".
NVGEMM_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int ordinal) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  const Device* const device = DeviceAt(ordinal);
  if (device == nullptr) return kInvalidDevice;
  const auto found = device->attributes.find(attribute);
  *value = found == device->attributes.end() ? 0 : found->second;
  return kSuccess;
}

NVGEMM_EXPORT Result cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  *context = PrimaryContext(device);
  return *context == nullptr ? kInvalidDevice : kSuccess;
}

NVGEMM_EXPORT Result cuCtxGetCurrent(void** context) {
  *context = CurrentContext();
  return kSuccess;
}

NVGEMM_EXPORT Result cuCtxSetCurrent(void* context) {
  CurrentContext() = static_cast<Context*>(context);
  return kSuccess;
}

// Fills at once, as all that a stream orders happens at once.
NVGEMM_EXPORT Result cuMemsetD2D8Async(Address to, std::size_t pitch, unsigned char value,
                                       std::size_t width, std::size_t height, void* stream) {
  if (pitch < width) return kInvalidValue;
  ++nvgemm_emulated_memsets;
  nvgemm_emulated_last_stream = stream;
  for (std::size_t row = 0; row < height; ++row) {
    std::memset(reinterpret_cast<char*>(to) + row * pitch, value, width);
  }
  return kSuccess;
}

NVGEMM_EXPORT Result cuMemsetD8Async(Address to, unsigned char value, std::size_t count,
                                     void* stream) {
  return cuMemsetD2D8Async(to, count, value, count, 1, stream);
}

// ---- Occupancy, which the launcher asks for with an empty kernel in PTX ----

static thread_local int capture_mode;

NVGEMM_EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}

NVGEMM_EXPORT Result cuModuleLoadData(void** module, const void* image) {
  if (nvgemm_emulated_rejects_ptx != 0) return kInvalidPtx;
  if (capture_mode != kRelaxedCapture || CurrentContext() == nullptr) return kInvalidPtx;
  if (std::strstr(static_cast<const char*>(image), ".entry nothing()") == nullptr) {
    return kInvalidPtx;
  }
  ++nvgemm_emulated_modules;
  *module = new Kernel{nullptr, "nothing", {}};
  return kSuccess;
}

NVGEMM_EXPORT Result cuModuleUnload(void* module) {
  --nvgemm_emulated_modules;
  delete static_cast<Kernel*>(module);
  return kSuccess;
}

NVGEMM_EXPORT Result cuModuleGetFunction(void** function, void* module, const char* name) {
  if (static_cast<Kernel*>(module)->name != name) return kNotFound;
  *function = module;
  return kSuccess;
}

NVGEMM_EXPORT Result cuFuncSetAttribute(void* function, int attribute, int value) {
  return SetKernelAttribute(function, attribute, value);
}

NVGEMM_EXPORT Result cuOccupancyMaxActiveClusters(int* clusters, void* function,
                                                  const DriverLaunch* config) {
  ++nvgemm_emulated_occupancy_questions;
  if (config->attribute_count != 1 || config->attributes->id != kClusterDimension) {
    return kInvalidValue;
  }
  const unsigned* const shape = config->attributes->value;
  const unsigned size = shape[0] * shape[1] * shape[2];
  const std::lock_guard<std::mutex> lock(StateMutex());
  auto& attributes = static_cast<Kernel*>(function)->attributes;
  if (static_cast<int>(config->shared_bytes) != attributes[kMaxDynamicShared] ||
      config->grid[0] % size != 0) {
    return kInvalidValue;
  }
  if (size > kPortableSize && attributes[kBigClusters] == 0) return kInvalidClusterSize;
  const Device* const device =
      CurrentContext() == nullptr ? nullptr : DeviceAt(CurrentContext()->device);
  if (device == nullptr) return kInvalidContext;
  const auto found = device->clusters.find(static_cast<int>(size));
  *clusters = found == device->clusters.end() ? 0 : found->second;
  return kSuccess;
}
