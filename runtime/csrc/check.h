// Checks the tensors of a launch, and makes the call that a kernel gets.

#ifndef NVGEMM_RUNTIME_CSRC_CHECK_H_
#define NVGEMM_RUNTIME_CSRC_CHECK_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>

#include "kernel_table.h"

namespace nvgemm {

inline constexpr int kMaxRank = 3;

// The tensors of one launch, as the caller gives them.
class Operands {
 public:
  Operands(const DLTensor& a, const DLTensor& b, const DLTensor& out) {
    Give(Role::kA, a);
    Give(Role::kB, b);
    Give(Role::kOut, out);
  }

  void Give(Role role, const DLTensor& tensor) {
    tensors_[static_cast<int>(role)] = &tensor;
    given_ |= SetOf(role);
  }

  // Only for roles that were given.
  const DLTensor& operator[](Role role) const { return *tensors_[static_cast<int>(role)]; }

  Roles extras() const { return given_ & ~SetOf({Role::kA, Role::kB, Role::kOut}); }

 private:
  const DLTensor* tensors_[kRoles];  // unset for roles that were not given
  Roles given_ = 0;
};

// A tensor that owns its shape and strides. Points into itself, so it cannot be moved.
struct TensorView {
  DLTensor tensor;
  int64_t shape[kMaxRank];
  int64_t strides[kMaxRank];

  TensorView() = default;
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;

  char* data() const { return static_cast<char*>(tensor.data) + tensor.byte_offset; }
};

// A call that passed every check.
struct CheckedCall {
  // The tensors that the kernel takes, with canonical strides: 1 along the contiguous dimension,
  // and along every other dimension of extent 1 a stride that a kernel may encode, whatever the
  // caller's tensor says. Without extras if one of the following is true.
  TensorView views[kRoles];
  bool out_is_empty;  // nothing is to be computed
  bool sum_is_empty;  // out is to be filled with zeros

  TensorView& operator[](Role role) { return views[static_cast<int>(role)]; }
  const TensorView& operator[](Role role) const { return views[static_cast<int>(role)]; }
};

// Checks the operands of one launch in full and fills `call`. Throws Failure that names the
// operand, what was observed and what is allowed.
void CheckOperands(const KernelSpec& spec, const Operands& operands, CheckedCall* call);

// As CheckOperands, but returns only whether they passed, which takes less time.
bool OperandsPass(const KernelSpec& spec, const Operands& operands, CheckedCall* call);

// Where the matrices of a view lie in memory, in bytes.
struct MemorySpan {
  uintptr_t begin;
  uintptr_t end;        // first byte behind the last element
  uintptr_t row_bytes;  // contiguous bytes of a row (or column)
  uintptr_t row_pitch;  // distance of rows; 0 if the view has one row
  uintptr_t batch_pitch;  // distance of matrices; 0 if the view has one matrix
};

// Whether two views may share a byte. Exact for disjoint spans and for column slices of one buffer;
// other spans that intersect count as overlapping. Spans are those of CheckOperands.
bool MayOverlap(const MemorySpan& x, const MemorySpan& y);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_CHECK_H_
