// What a launch needs from the CUDA driver, which is opened when the first CUDA tensor arrives.

#ifndef NVGEMM_RUNTIME_CSRC_CUDA_DRIVER_H_
#define NVGEMM_RUNTIME_CSRC_CUDA_DRIVER_H_

#include "check.h"

namespace nvgemm::cuda {

// Throws Failure if this process was forked from one that had launched on CUDA: the driver does
// not work in such a child. Otherwise remembers that this process uses CUDA. Comes before all else.
void RefuseForkedChild();

// Throws Failure unless the device's compute capability is one that the rule allows.
void CheckArchitecture(const KernelSpec& spec, int device);

// Makes the primary context of a device current in this thread, and what was current before again
// at the end: a launch may leave another one current (NVIDIA/cutlass#2808).
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* previous_ = nullptr;
};

// Fills a view that passed CheckOperands with zero bytes, in order on `stream`. Only enqueues, so
// that a CUDA graph can capture it.
void FillWithZeros(const TensorView& view, void* stream);

// Fills memory with zero bytes, in order on `stream`; only enqueues.
void FillBytesWithZeros(void* data, int64_t bytes, void* stream);

// How many clusters of so many thread blocks, each of which fills a multiprocessor, the device runs
// at once. The device's context must be current. Asked of the driver once a device and size.
int64_t ClustersAtOnce(int device, int cluster_size);

}  // namespace nvgemm::cuda

#endif  // NVGEMM_RUNTIME_CSRC_CUDA_DRIVER_H_
