// Operators torch.ops.nvgemm_aot.*, over torch's stable C ABI.

#ifndef NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_
#define NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_

#include <cstdint>

namespace nvgemm {

// Result of nvgemm_aot::abi(), which Python checks. Changes with the operators' schemas.
inline constexpr int64_t kAbi = 8;

// Version that generated C++ checks before it calls an operator. Changes only with the schemas of
// prepare and try_gemm, because packages compiled for another number run on ATen forever.
inline constexpr int64_t kCalledAbi = 3;

// Defines and registers the operators; later calls do nothing. Throws Failure.
void RegisterTorchOps();

// Returns kCalledAbi once torch has this library's operators; 0 before.
int64_t RegisteredAbi();

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_
