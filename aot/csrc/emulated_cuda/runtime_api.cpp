// The public CUDA runtime API's functions that NVIDIA's libcuda_dialect_runtime_static.a calls for
// kernels' launchers. Those that no launcher calls fail, and are named.

#include <cstring>
#include <memory>
#include <set>

#include "device.h"

using namespace nvgemm::emulated;  // NOLINT(build/namespaces): all below has C linkage

NVGEMM_EXPORT Result cuDeviceGet(int* device, int ordinal);
NVGEMM_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int ordinal);

static thread_local Result last_error;

// Remembers an error for cudaGetLastError.
static Result Returning(Result result) {
  if (result != kSuccess) last_error = result;
  return result;
}

NVGEMM_EXPORT Result cudaGetLastError() {
  const Result error = last_error;
  last_error = kSuccess;
  return error;
}

NVGEMM_EXPORT const char* cudaGetErrorName(Result error) { return ErrorName(error); }
NVGEMM_EXPORT const char* cudaGetErrorString(Result error) { return ErrorName(error); }

NVGEMM_EXPORT Result cudaDriverGetVersion(int* version) {
  *version = 13020;  // CUDA 13.2
  return kSuccess;
}

NVGEMM_EXPORT Result cudaGetDeviceCount(int* count) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  *count = DeviceCount();
  return Returning(*count == 0 ? kNoDevice : kSuccess);
}

NVGEMM_EXPORT Result cudaSetDevice(int device) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  Context* const context = PrimaryContext(device);
  if (context == nullptr) return Returning(kInvalidDevice);
  CurrentContext() = context;
  return kSuccess;
}

NVGEMM_EXPORT Result cudaGetDevice(int* device) {
  *device = CurrentContext() == nullptr ? 0 : CurrentContext()->device;
  return kSuccess;
}

NVGEMM_EXPORT Result cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return Returning(cuDeviceGetAttribute(value, attribute, device));
}

NVGEMM_EXPORT Result cudaDeviceSynchronize() { return kSuccess; }
NVGEMM_EXPORT Result cudaStreamSynchronize(void*) { return kSuccess; }

// ---- Libraries and launches ----

// Guarded by StateMutex. Libraries that are never unloaded live as long as the process.
static std::set<Library*>& Libraries() {
  static auto* const libraries = new std::set<Library*>;
  return *libraries;
}

NVGEMM_EXPORT Result cudaLibraryLoadData(void** library, const void* image, void*, void**, unsigned,
                                         void*, void**, unsigned) {
  auto loaded = std::make_unique<Library>(Library{image, {}});
  const std::lock_guard<std::mutex> lock(StateMutex());
  *library = *Libraries().insert(loaded.release()).first;
  return kSuccess;
}

NVGEMM_EXPORT Result cudaLibraryUnload(void* handle) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  auto* const library = static_cast<Library*>(handle);
  if (Libraries().erase(library) == 0) return Returning(kInvalidHandle);
  delete library;
  return kSuccess;
}

NVGEMM_EXPORT Result cudaLibraryGetKernel(void** kernel, void* handle, const char* name) {
  const std::lock_guard<std::mutex> lock(StateMutex());
  auto* const library = static_cast<Library*>(handle);
  if (Libraries().count(library) == 0) return Returning(kInvalidHandle);
  *kernel = &library->kernels.try_emplace(name, Kernel{library, name, {}}).first->second;
  return kSuccess;
}

NVGEMM_EXPORT Result cudaFuncSetAttribute(void* function, int attribute, int value) {
  return Returning(SetKernelAttribute(function, attribute, value));
}

NVGEMM_EXPORT Result cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int) {
  return Returning(SetKernelAttribute(kernel, attribute, value));
}

NVGEMM_EXPORT Result cudaLaunchKernelExC(const RuntimeLaunch* config, const void* function,
                                         void** parameters) {
  return Returning(RunLaunch(function, *config, parameters));
}

// ---- Driver functions by name ----

static Result FunctionIsUnsupported() { return kNotSupported; }

static Result GetKernelAttribute(int* value, int attribute, void* kernel, int) {
  if (attribute != kStaticShared) return Unsupported("cuKernelGetAttribute of another attribute");
  if (kernel == nullptr) return kInvalidHandle;
  *value = StaticSharedBytes(*static_cast<Kernel*>(kernel));
  return *value < 0 ? kNotFound : kSuccess;
}

NVGEMM_EXPORT Result cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                      unsigned long long, int* status) {
  if (status != nullptr) *status = 0;  // cudaDriverEntryPointSuccess
  if (std::strcmp(name, "cuDeviceGet") == 0) {
    *function = reinterpret_cast<void*>(cuDeviceGet);
    return kSuccess;
  }
  if (std::strcmp(name, "cuKernelGetAttribute") == 0) {
    *function = reinterpret_cast<void*>(GetKernelAttribute);
    return kSuccess;
  }
  Unsupported(name);
  *function = reinterpret_cast<void*>(FunctionIsUnsupported);
  return kSuccess;
}

// ---- The rest of what the archive refers to ----

#define NVGEMM_UNSUPPORTED(name) \
  NVGEMM_EXPORT Result name() { return Returning(Unsupported(#name)); }

NVGEMM_UNSUPPORTED(cudaEventCreate)
NVGEMM_UNSUPPORTED(cudaEventCreateWithFlags)
NVGEMM_UNSUPPORTED(cudaEventDestroy)
NVGEMM_UNSUPPORTED(cudaEventElapsedTime)
NVGEMM_UNSUPPORTED(cudaEventQuery)
NVGEMM_UNSUPPORTED(cudaEventRecord)
NVGEMM_UNSUPPORTED(cudaEventRecordWithFlags)
NVGEMM_UNSUPPORTED(cudaEventSynchronize)
NVGEMM_UNSUPPORTED(cudaFree)
NVGEMM_UNSUPPORTED(cudaFreeAsync)
NVGEMM_UNSUPPORTED(cudaFreeHost)
NVGEMM_UNSUPPORTED(cudaGetDeviceProperties)
NVGEMM_UNSUPPORTED(cudaGraphAddKernelNode)
NVGEMM_UNSUPPORTED(cudaGraphCreate)
NVGEMM_UNSUPPORTED(cudaGraphDestroy)
NVGEMM_UNSUPPORTED(cudaGraphExecDestroy)
NVGEMM_UNSUPPORTED(cudaGraphInstantiate)
NVGEMM_UNSUPPORTED(cudaGraphKernelNodeGetAttribute)
NVGEMM_UNSUPPORTED(cudaGraphKernelNodeSetAttribute)
NVGEMM_UNSUPPORTED(cudaGraphLaunch)
NVGEMM_UNSUPPORTED(cudaLibraryGetGlobal)
NVGEMM_UNSUPPORTED(cudaLibraryGetKernelCount)
NVGEMM_UNSUPPORTED(cudaLibraryGetManaged)
NVGEMM_UNSUPPORTED(cudaLibraryGetUnifiedFunction)
NVGEMM_UNSUPPORTED(cudaLibraryLoadFromFile)
NVGEMM_UNSUPPORTED(cudaMalloc)
NVGEMM_UNSUPPORTED(cudaMallocAsync)
NVGEMM_UNSUPPORTED(cudaMallocHost)
NVGEMM_UNSUPPORTED(cudaMallocManaged)
NVGEMM_UNSUPPORTED(cudaMemcpy)
NVGEMM_UNSUPPORTED(cudaMemcpy3D)
NVGEMM_UNSUPPORTED(cudaMemcpy3DAsync)
NVGEMM_UNSUPPORTED(cudaMemcpyAsync)
NVGEMM_UNSUPPORTED(cudaMemset)
NVGEMM_UNSUPPORTED(cudaMemsetAsync)
NVGEMM_UNSUPPORTED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
NVGEMM_UNSUPPORTED(cudaProfilerStart)
NVGEMM_UNSUPPORTED(cudaProfilerStop)
NVGEMM_UNSUPPORTED(cudaStreamAddCallback)
NVGEMM_UNSUPPORTED(cudaStreamBeginCapture)
NVGEMM_UNSUPPORTED(cudaStreamCreate)
NVGEMM_UNSUPPORTED(cudaStreamDestroy)
NVGEMM_UNSUPPORTED(cudaStreamEndCapture)
NVGEMM_UNSUPPORTED(cudaStreamWaitEvent)

#undef NVGEMM_UNSUPPORTED
