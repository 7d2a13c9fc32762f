// Checks a launch's tensors and builds the kernel's call.

#ifndef NVGEMM_RUNTIME_CSRC_CHECK_H_
#define NVGEMM_RUNTIME_CSRC_CHECK_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>

#include "core/kernel_table.h"

namespace nvgemm {

inline constexpr int kMaxRank = 3;

// Tensors for one launch, as the caller passes them.
class Operands {
 public:
  Operands(const DLTensor& a, const DLTensor& b, const DLTensor& out) {
    Set(Role::kA, a);
    Set(Role::kB, b);
    Set(Role::kOut, out);
  }

  void Set(Role role, const DLTensor& tensor) {
    tensors_[static_cast<int>(role)] = &tensor;
    present_ |= SetOf(role);
  }

  // Only for present roles.
  const DLTensor& operator[](Role role) const { return *tensors_[static_cast<int>(role)]; }

  Roles extras() const { return present_ & ~SetOf({Role::kA, Role::kB, Role::kOut}); }

 private:
  const DLTensor* tensors_[kRoles];  // unset for missing roles
  Roles present_ = 0;
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
  // Tensors that the kernel takes, with canonical strides: 1 along the contiguous dimension; along
  // every other dimension with extent 1, a stride that a kernel may encode, whatever the caller's
  // tensor has. Extras are missing if one of the following flags is true.
  TensorView views[kRoles];
  bool out_is_empty;  // nothing to compute
  bool sum_is_empty;  // out must be filled with zeros

  TensorView& operator[](Role role) { return views[static_cast<int>(role)]; }
  const TensorView& operator[](Role role) const { return views[static_cast<int>(role)]; }
};

// Checks a launch's operands completely and fills `call`. Throws Failure with the operand, and the
// observed and allowed values.
void CheckOperands(const KernelSpec& spec, const Operands& operands, CheckedCall* call);

// Like CheckOperands, but only returns true if they passed, which is faster.
bool OperandsPass(const KernelSpec& spec, const Operands& operands, CheckedCall* call);

// Memory that a view's matrices occupy, in bytes.
struct MemorySpan {
  uintptr_t begin;
  uintptr_t end;        // first byte after the last element
  uintptr_t row_bytes;  // contiguous bytes in a row (or column)
  uintptr_t row_pitch;  // distance between rows; 0 if the view has one row
  uintptr_t batch_pitch;  // distance between matrices; 0 if the view has one matrix
};

// Returns true if two views may share a byte. Exact for disjoint spans and for column slices of one
// buffer; other intersecting spans count as overlapping. Spans come from CheckOperands.
bool MayOverlap(const MemorySpan& x, const MemorySpan& y);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_CHECK_H_
