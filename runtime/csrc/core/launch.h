// Launches a kernel, for all callers.

#ifndef NVGEMM_RUNTIME_CSRC_LAUNCH_H_
#define NVGEMM_RUNTIME_CSRC_LAUNCH_H_

#include <tvm/ffi/c_api.h>

#include "checks/check.h"
#include "core/kernel_table.h"

namespace nvgemm {

// Checks the operands and computes. CUDA kernels run on TVM-FFI's environment stream for the
// tensors' device. Thread-safe. Throws Failure.
void Launch(Kernel* kernel, const Operands& operands);

// Like Launch, but returns false without a launch if the kernel cannot take the operands or does
// not run on their device. Thread-safe. Throws Failure for any other error.
bool TryLaunch(Kernel* kernel, const Operands& operands);

// Like TryLaunch, for code that falls back to ATen and cannot handle errors: also returns false if
// memory is short, or if the kernel fails before its first run here, after which it is not tried
// again. Reports both. Thread-safe. Throws Failure if a kernel that ran before fails.
bool TryServe(Kernel* kernel, const Operands& operands);

// Tells if the installed libcute_dsl_runtime.so keeps its lock after failing to load a kernel. If
// so, after a failure, Launch throws Failure for kernels that were never launched.
void SetLibraryKeepsLock(bool keeps);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_LAUNCH_H_
