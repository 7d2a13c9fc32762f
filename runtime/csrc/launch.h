// The one way a kernel is launched, whoever calls.

#ifndef NVGEMM_RUNTIME_CSRC_LAUNCH_H_
#define NVGEMM_RUNTIME_CSRC_LAUNCH_H_

#include <tvm/ffi/c_api.h>

#include "check.h"
#include "kernel_table.h"

namespace nvgemm {

// Checks the operands and computes what the kernel computes of them. CUDA kernels run on the stream
// that TVM-FFI's environment holds for the tensors' device. Thread-safe. Throws Failure.
void Launch(Kernel* kernel, const Operands& operands);

// As Launch, but false, with nothing launched, where the kernel cannot take the operands or does
// not run on their device. Thread-safe. Throws Failure where anything else goes wrong.
bool TryLaunch(Kernel* kernel, const Operands& operands);

// As TryLaunch, for code that has ATen behind it and cannot take errors: false also where memory is
// short, and where the kernel fails before it has run here, after which it is not tried again. Both
// are reported. Thread-safe. Throws Failure where a kernel that ran before fails.
bool TryServe(Kernel* kernel, const Operands& operands);

// Whether the installed libcute_dsl_runtime.so keeps its lock where it fails to load a kernel. Then,
// after one has failed, Launch throws Failure for kernels that were not launched before.
void SetLibraryKeepsLock(bool keeps);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_LAUNCH_H_
