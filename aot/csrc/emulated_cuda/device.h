// Emulated devices, kernels and launches, behind both APIs.

#ifndef NVGEMM_AOT_CSRC_EMULATED_CUDA_DEVICE_H_
#define NVGEMM_AOT_CSRC_EMULATED_CUDA_DEVICE_H_

#include <map>
#include <mutex>
#include <string>

#include "abi.h"

namespace nvgemm::emulated {

struct Device {
  std::map<int, int> attributes;  // by CUdevice_attribute
  std::map<int, int> clusters;    // clusters at once by size, where a block fills a multiprocessor
};

// A primary context; its address is its handle.
struct Context {
  int device;
};

struct Library;

// A kernel; its address is its handle, also as a function.
struct Kernel {
  Library* library;
  std::string name;
  std::map<int, int> attributes;  // by CUfunction_attribute
};

struct Library {
  const void* image;
  std::map<std::string, Kernel> kernels;  // by name
};

// A launch as Python receives it. `parameters` has a pointer for each kernel parameter;
// `most_shared_bytes` and `allows_big_clusters` are what the launcher set for the kernel.
struct Launch {
  const void* image;
  const char* kernel;
  unsigned grid[3];
  unsigned block[3];
  std::uint64_t shared_bytes;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
  int device;
  int most_shared_bytes;
  int allows_big_clusters;
  void* const* parameters;
};

// Guards devices, libraries, and kernels' attributes.
std::mutex& StateMutex();

// Returns a device, or nullptr; the mutex must be held.
Device* DeviceAt(int ordinal);

// Returns the number of devices; the mutex must be held.
int DeviceCount();

// Returns a device's primary context, or nullptr; the mutex must be held.
Context* PrimaryContext(int ordinal);

// Context that is current in this thread.
Context*& CurrentContext();

// Sets an attribute of a kernel or a module's function.
Result SetKernelAttribute(void* kernel, int attribute, int value);

// Hands a launch to Python, which executes it before this returns.
Result RunLaunch(const void* kernel, const RuntimeLaunch& config, void* const* parameters);

// Returns a kernel's static shared memory in bytes, without what CUDA reserves, as Python reads it
// from the image; -1 if the image has no such kernel.
int StaticSharedBytes(const Kernel& kernel);

// Names an error, for messages.
const char* ErrorName(Result error);

// Records the name of a function that the stand-in lacks and that was called or asked for.
Result Unsupported(const char* name);

}  // namespace nvgemm::emulated

#endif  // NVGEMM_AOT_CSRC_EMULATED_CUDA_DEVICE_H_
