// The checks of one launch, one tensor after the other. Not for others than check*.cpp.

#ifndef NVGEMM_RUNTIME_CSRC_CHECKER_H_
#define NVGEMM_RUNTIME_CSRC_CHECKER_H_

#include <string>

#include "check.h"
#include "failure.h"

namespace nvgemm {

// Kernels take extents as signed 32-bit integers. Their strides are held to the same limit, for
// nothing that a compiled kernel says about itself shows that it computes with wider ones.
inline constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;

std::string DTypeText(DLDataType dtype);
std::string DeviceText(DLDevice device);
std::string ShapeText(const DLTensor& tensor);
std::string StridesText(const DLTensor& tensor);

// How a check fails where nobody asks why: without the cost of a message.
struct Refused {};

// Dimensions of a and out are counted from the end, since a batch is in front: `rows` is rank - 2
// and `columns` is rank - 1.
class Checker {
 public:
  Checker(const KernelSpec& spec, CheckedCall* call, bool quiet)
      : spec_(spec), call_(*call), quiet_(quiet), rows_(spec.rank() - 2), columns_(spec.rank() - 1) {}

  void CheckAll(const Operands& operands) const;

 private:
  template <typename... Parts>
  [[noreturn]] void Refuse(const char* kind, const Parts&... parts) const {
    if (quiet_) throw Refused();
    throw Failure(kind, Text("kernel ", ShortId(spec_.id), " (", OpName(spec_.op), "): ", parts...));
  }

  void CheckGiven(const Operands& operands) const;
  void CheckDType(Role role, const DLTensor& from, DLDataType dtype) const;
  TensorView& Copy(Role role, const DLTensor& from, int rank, DLDataType dtype) const;
  void CheckShapes() const;
  void CheckDevice(Role role, const DLTensor& tensor) const;
  MemorySpan CheckLayout(Role role, bool row_major) const;
  void CheckStride(Role role, int dimension, int64_t step, int64_t inner_extent) const;
  uintptr_t CheckAddress(Role role, int64_t alignment_bytes) const;
  uintptr_t EndOf(Role role, uintptr_t begin, int64_t elements, int64_t element_bytes) const;
  MemorySpan Locate(Role role, int64_t elements, bool several, int outer,
                    int64_t inner_extent) const;
  void CheckOverlap(Role role, const MemorySpan& input, const MemorySpan& out) const;
  void CheckCompact() const;

  // In check_extras.cpp.
  void CheckExtras(const Operands& operands, const MemorySpan& out) const;
  void CheckScale(Role role, const DLTensor& from, const MemorySpan& out) const;
  void CheckRowScale(Role role, const DLTensor& from, int64_t rows) const;
  void CheckOffsets(const DLTensor& from, const MemorySpan& out) const;
  void CheckAddend(const DLTensor& from, const MemorySpan& out) const;
  void CopyRow(const DLTensor& from) const;
  void CopyAsVector(Role role, const DLTensor& from, DLDataType dtype, int64_t elements,
                    const char* why) const;
  void CheckVector(Role role, int64_t elements, int64_t alignment_bytes,
                   const MemorySpan& out) const;

  const KernelSpec& spec_;
  CheckedCall& call_;
  const bool quiet_;
  const int rows_;
  const int columns_;
};

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_CHECKER_H_
