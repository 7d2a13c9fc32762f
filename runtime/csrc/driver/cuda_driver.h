// CUDA driver functions for launches; the driver is opened when the first CUDA tensor arrives.

#ifndef NVGEMM_RUNTIME_CSRC_CUDA_DRIVER_H_
#define NVGEMM_RUNTIME_CSRC_CUDA_DRIVER_H_

#include "checks/check.h"

namespace nvgemm::cuda {

// Throws Failure in a process forked from one that had launched on CUDA, because the driver does
// not work there. Otherwise records that this process uses CUDA. Must precede all other calls.
void RefuseForkedChild();

// Throws Failure unless the rule allows the device's compute capability.
void CheckArchitecture(const KernelSpec& spec, int device);

// Makes a device's primary context current in this thread, and restores the previous one at the
// end: a launch may leave another one current (NVIDIA/cutlass#2808).
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* previous_ = nullptr;
};

// Fills a view that passed CheckOperands with zero bytes, in stream order. Only enqueues, so a CUDA
// graph can capture it.
void FillWithZeros(const TensorView& view, void* stream);

// Fills memory with zero bytes, in stream order; only enqueues.
void FillBytesWithZeros(void* data, int64_t bytes, void* stream);

// Returns the number of clusters that the device runs at once, if each thread block fills a
// multiprocessor. The device's context must be current. Queries the driver once per device and
// size.
int64_t ClustersAtOnce(int device, int cluster_size);

}  // namespace nvgemm::cuda

#endif  // NVGEMM_RUNTIME_CSRC_CUDA_DRIVER_H_
