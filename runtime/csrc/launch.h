// The one way a kernel is launched, whoever calls.

#ifndef NVGEMM_RUNTIME_CSRC_LAUNCH_H_
#define NVGEMM_RUNTIME_CSRC_LAUNCH_H_

#include <tvm/ffi/c_api.h>

#include "kernel_table.h"

namespace nvgemm {

// Checks the operands and computes out = a @ b. CUDA kernels run on the stream that TVM-FFI's
// environment holds for the tensors' device. Thread-safe. Throws Failure.
void Launch(Kernel* kernel, const DLTensor& a, const DLTensor& b, const DLTensor& out);

// As Launch, but false, with nothing launched, where the kernel cannot take the operands or does
// not run on their device. Thread-safe. Throws Failure where anything else goes wrong.
bool TryLaunch(Kernel* kernel, const DLTensor& a, const DLTensor& b, const DLTensor& out);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_LAUNCH_H_
