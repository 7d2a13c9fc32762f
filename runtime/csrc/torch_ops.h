// The operators torch.ops.nvgemm_aot.*, over torch's stable C ABI.

#ifndef NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_
#define NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_

#include <cstdint>

namespace nvgemm {

// The result of nvgemm_aot::abi(), which compiled graphs check before they call other operators.
// Changes with the operators' schemas.
inline constexpr int64_t kAbi = 4;

// Defines and registers the operators; later calls do nothing. Throws Failure.
void RegisterTorchOps();

// Version of the operators that torch has of this library; 0 before they are registered.
int64_t RegisteredAbi();

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_TORCH_OPS_H_
