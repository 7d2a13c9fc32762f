// Types and numbers of the public CUDA runtime and driver ABIs that the stand-in needs, copied from
// cuda_runtime_api.h and cuda.h. The two use the same numbers for errors and attributes.

#ifndef NVGEMM_AOT_CSRC_EMULATED_CUDA_ABI_H_
#define NVGEMM_AOT_CSRC_EMULATED_CUDA_ABI_H_

#include <cstddef>
#include <cstdint>

#define NVGEMM_EXPORT extern "C" __attribute__((visibility("default")))

namespace nvgemm::emulated {

using Result = int;                  // CUresult and cudaError_t
using Address = unsigned long long;  // CUdeviceptr  NOLINT(runtime/int): as in cuda.h

constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kNoDevice = 100;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidPtx = 218;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr Result kLaunchFailed = 719;
constexpr Result kNotSupported = 801;
constexpr Result kInvalidClusterSize = 912;

constexpr int kStaticShared = 1;       // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int kMaxDynamicShared = 8;   // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kBigClusters = 14;       // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
constexpr int kClusterDimension = 4;   // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr unsigned kPortableSize = 8;  // thread blocks in a cluster without kBigClusters
constexpr int kRelaxedCapture = 2;     // CU_STREAM_CAPTURE_MODE_RELAXED

// CUlaunchAttribute, or cudaLaunchAttribute.
struct LaunchAttribute {
  int id;
  char padding[4];
  unsigned value[16];
};

// CUlaunchConfig.
struct DriverLaunch {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

// cudaLaunchConfig_t.
struct RuntimeLaunch {
  unsigned grid[3];
  unsigned block[3];
  std::size_t shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

}  // namespace nvgemm::emulated

#endif  // NVGEMM_AOT_CSRC_EMULATED_CUDA_ABI_H_
