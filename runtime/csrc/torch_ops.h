// The operators torch.ops.nvgemm_aot.*, over torch's stable C ABI.

#ifndef NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_
#define NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_

#include <cstdint>

namespace nvgemm {

// The result of nvgemm_aot::abi(), which Python checks. Changes with the operators' schemas.
inline constexpr int64_t kAbi = 8;

// What generated C++ checks before it calls an operator. Changes with the schemas of prepare and
// try_gemm alone, for packages that were compiled for another number run on ATen for ever.
inline constexpr int64_t kCalledAbi = 3;

// Defines and registers the operators; later calls do nothing. Throws Failure.
void RegisterTorchOps();

// kCalledAbi, once torch has the operators of this library; 0 before.
int64_t RegisteredAbi();

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_
