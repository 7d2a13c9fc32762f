// Checks extra operands. Block scales may have any shape, because the swizzle fixes their order;
// the kernel gets them as a vector.

#include <string>

#include "checks/checker.h"

namespace nvgemm {
namespace {

// Alignment that block-scaled kernels assume for scales (nvgemm_runtime/gemm/types.py), in bytes.
// TMA moves row scales like operands, so they need the kernel's own alignment.
constexpr int64_t kSwizzledAlignment = 32;

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Scales form blocks of 128 rows by 4 along k, padded to whole blocks; equals
// types.swizzled_elements.
int64_t SwizzledElements(int64_t rows, int64_t k, int64_t block) {
  return RoundUp(rows, 128) * RoundUp((k + block - 1) / block, 4);
}

// Returns true if a tensor has no gaps, last dimension first; extents of 1 may have any stride.
bool IsCompact(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t step = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
    if (__builtin_mul_overflow(step, tensor.shape[i], &step)) return false;
  }
  return true;
}

// Returns the number of elements; -1 if it overflows 64 bits.
int64_t ElementsOf(const DLTensor& tensor) {
  int64_t elements = 1;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (__builtin_mul_overflow(elements, tensor.shape[i], &elements)) return -1;
  }
  return elements;
}

}  // namespace

void Checker::CheckExtras(const Operands& operands, const MemorySpan& out) const {
  if (spec_.scales != ScaleKind::kNone) {
    CheckScale(Role::kScaleA, operands[Role::kScaleA], out);
    CheckScale(Role::kScaleB, operands[Role::kScaleB], out);
  }
  if (HasGroups(spec_.op)) CheckOffsets(operands[Role::kOffsets], out);
  if (IsGathered(spec_.op)) CheckRows(operands[Role::kRows], out);
  if (spec_.addend != AddendKind::kNone) CheckAddend(operands[Role::kAddend], out);
  if (spec_.form == GateForm::kGradientSums) CheckSums(operands[Role::kSums], out);
}

void Checker::CheckScale(Role role, const DLTensor& from, const MemorySpan& out) const {
  const TensorView& result = call_[Role::kOut];
  const int64_t rows = role == Role::kScaleA ? result.shape[rows_] : result.shape[columns_];
  switch (spec_.scales) {
    case ScaleKind::kRow:
      CheckRowScale(role, from, rows);
      return CheckVector(role, rows, spec_.alignment_bytes, out);
    case ScaleKind::kTensor:
      CopyAsVector(role, from, spec_.scale_dtype, 1, "one for the whole operand");
      return CheckVector(role, 1, kElementAlignment, out);
    default: {
      const int64_t k = call_[Role::kA].shape[spec_.a_rank() - 1] * spec_.a_dtype.lanes;
      const int64_t elements = SwizzledElements(rows, k, spec_.scale_block);
      const std::string why =
          quiet_ ? std::string()
                 : Text(rows, " rows and k = ", k, " in blocks of ", spec_.scale_block,
                        ", swizzled 32 x 4 x 4 and padded to 128 rows by 4 blocks");
      CopyAsVector(role, from, spec_.scale_dtype, elements, why.c_str());
      return CheckVector(role, elements, kSwizzledAlignment, out);
    }
  }
}

void Checker::CheckRowScale(Role role, const DLTensor& from, int64_t rows) const {
  if (HasGroups(spec_.op)) return CheckRowScaleOfGroups(role, from, rows);
  const int along = role == Role::kScaleA ? 0 : 1;
  TensorView& to = Copy(role, from, 2, spec_.scale_dtype);
  if (to.shape[along] != rows || to.shape[1 - along] != 1 || !IsCompact(to.tensor)) {
    Refuse(kValueError, RoleName(role), " has shape ", ShapeText(to.tensor), " and strides ",
           StridesText(to.tensor), "; must be contiguous and of shape (", along == 0 ? rows : 1,
           ", ", along == 0 ? 1 : rows, "), one for each ", along == 0 ? "row of a" : "column of b");
  }
  to.strides[0] = to.shape[1];
  to.strides[1] = 1;
}

// torch's shapes: a vector for the rows of a, and one row per matrix of b.
void Checker::CheckRowScaleOfGroups(Role role, const DLTensor& from, int64_t rows) const {
  if (role == Role::kScaleA) {
    TensorView& to = Copy(role, from, 1, spec_.scale_dtype);
    if (to.shape[0] != rows || !IsCompact(to.tensor)) {
      Refuse(kValueError, RoleName(role), " has shape ", ShapeText(to.tensor), " and strides ",
             StridesText(to.tensor), "; must be contiguous and of shape (", rows,
             "), one for each row of a");
    }
    to.strides[0] = 1;
    return;
  }
  const int64_t groups = call_[Role::kB].shape[0];
  TensorView& to = Copy(role, from, 2, spec_.scale_dtype);
  if (to.shape[0] != groups || to.shape[1] != rows || !IsCompact(to.tensor)) {
    Refuse(kValueError, RoleName(role), " has shape ", ShapeText(to.tensor), " and strides ",
           StridesText(to.tensor), "; must be contiguous and of shape (", groups, ", ", rows,
           "), one for each column of each matrix of b");
  }
  to.strides[0] = rows;
  to.strides[1] = 1;
}

void Checker::CheckOffsets(const DLTensor& from, const MemorySpan& out) const {
  const Role grouped = GroupsRows(spec_.op) ? Role::kB : Role::kOut;
  const int64_t groups = call_[grouped].shape[0];
  TensorView& to = Copy(Role::kOffsets, from, 1, DLDataType{kDLInt, 32, 1});
  if (to.shape[0] != groups || (groups > 1 && to.strides[0] != 1)) {
    Refuse(kValueError, "offsets have shape ", ShapeText(to.tensor), " and strides ",
           StridesText(to.tensor), "; must be contiguous and of shape (", groups,
           "), one end for each matrix of ", RoleName(grouped));
  }
  to.strides[0] = 1;
  CheckVector(Role::kOffsets, groups, kElementAlignment, out);
}

// Checks indices: a row in b for each element of a, or in a for each row of out. Kernels check
// their values.
void Checker::CheckRows(const DLTensor& from, const MemorySpan& out) const {
  if (spec_.op == Op::kGatheredGroupedMm) {
    const int64_t rows = call_[Role::kOut].shape[rows_];
    CopyAsVector(Role::kRows, from, DLDataType{kDLInt, 32, 1}, rows, "one for each row of out");
    return CheckVector(Role::kRows, rows, kElementAlignment, out);
  }
  const TensorView& a = call_[Role::kA];
  TensorView& to = Copy(Role::kRows, from, 2, DLDataType{kDLInt, 32, 1});
  if (to.shape[0] != a.shape[0] || to.shape[1] != a.shape[1] || !IsCompact(to.tensor)) {
    Refuse(kValueError, "rows have shape ", ShapeText(to.tensor), " and strides ",
           StridesText(to.tensor), "; must be contiguous and of the shape of a, ",
           ShapeText(a.tensor));
  }
  to.strides[0] = to.shape[1];
  to.strides[1] = 1;
  CheckVector(Role::kRows, ElementsOf(to.tensor), kElementAlignment, out);
}

void Checker::CheckAddend(const DLTensor& from, const MemorySpan& out) const {
  if (spec_.addend == AddendKind::kRow) {
    if (GroupsRows(spec_.op)) return CheckRowsOfGroups(from, out);
    CopyRow(from);
    return CheckVector(Role::kAddend, ProductColumns(), spec_.alignment_bytes, out);
  }
  if (spec_.addend == AddendKind::kGates) return CheckGates(from, out);
  const TensorView& result = call_[Role::kOut];
  const TensorView& to = Copy(Role::kAddend, from, spec_.out_rank(), spec_.addend_dtype);
  for (int i = 0; i < spec_.out_rank(); ++i) {
    if (to.shape[i] != result.shape[i]) {
      Refuse(kValueError, "addend has shape ", ShapeText(to.tensor), "; must have that of out, ",
             ShapeText(result.tensor));
    }
  }
  CheckDevice(Role::kAddend, to.tensor);
  const MemorySpan span = CheckLayout(Role::kAddend, true);
  // FORMAT.md requires such kernels to read an element before they write it.
  if (spec_.op == Op::kGroupedMm && spec_.form == GateForm::kNone && IsSameMatrix(span, out)) return;
  CheckOverlap(Role::kAddend, span, out);
}

// Checks for one gate per product element.
void Checker::CheckGates(const DLTensor& from, const MemorySpan& out) const {
  const int64_t rows = call_[Role::kOut].shape[rows_];
  const TensorView& to = Copy(Role::kAddend, from, 2, spec_.addend_dtype);
  if (to.shape[0] != rows || to.shape[1] != ProductColumns()) {
    Refuse(kValueError, "addend has shape ", ShapeText(to.tensor), "; must have (", rows, ", ",
           ProductColumns(), "), a gate for each element of the product");
  }
  CheckDevice(Role::kAddend, to.tensor);
  CheckOverlap(Role::kAddend, CheckLayout(Role::kAddend, true), out);
}

// Checks for one row per group.
void Checker::CheckRowsOfGroups(const DLTensor& from, const MemorySpan& out) const {
  const int64_t groups = call_[Role::kB].shape[0];
  const TensorView& to = Copy(Role::kAddend, from, 2, spec_.addend_dtype);
  if (to.shape[0] != groups || to.shape[1] != ProductColumns()) {
    Refuse(kValueError, "addend has shape ", ShapeText(to.tensor), "; must have (", groups, ", ",
           ProductColumns(), "), a row for each matrix of b");
  }
  CheckDevice(Role::kAddend, to.tensor);
  CheckOverlap(Role::kAddend, CheckLayout(Role::kAddend, true), out);
}

// Checks the second result: parts for each row, disjoint from all inputs.
void Checker::CheckSums(const DLTensor& from, const MemorySpan& out) const {
  const int64_t rows = call_[Role::kOut].shape[rows_];
  const int64_t parts = RoundUp(ProductColumns(), kSummedColumns) / kSummedColumns;
  TensorView& to = Copy(Role::kSums, from, 2, DLDataType{kDLFloat, 32, 1});
  if (to.shape[0] != rows || to.shape[1] != parts || !IsCompact(to.tensor)) {
    Refuse(kValueError, "sums have shape ", ShapeText(to.tensor), " and strides ",
           StridesText(to.tensor), "; must be contiguous and of shape (", rows, ", ", parts,
           "), a part for each ", kSummedColumns, " columns of the product");
  }
  to.strides[0] = parts;
  to.strides[1] = 1;
  CheckVector(Role::kSums, rows * parts, kElementAlignment, out);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(to.data());
  const uintptr_t bytes = static_cast<uintptr_t>(rows * parts) * sizeof(float);
  const MemorySpan sums{begin, begin + bytes, bytes, 0, 0};
  const auto check_disjoint = [&](Role role, bool row_major) {
    CheckOverlap(role, CheckLayout(role, row_major), sums, Role::kSums);
  };
  check_disjoint(Role::kA, spec_.a_row_major);
  check_disjoint(Role::kB, spec_.b_row_major);
  check_disjoint(Role::kAddend, true);
  const TensorView& offsets = call_[Role::kOffsets];
  const uintptr_t ends = reinterpret_cast<uintptr_t>(offsets.data());
  const uintptr_t length = static_cast<uintptr_t>(offsets.shape[0]) * sizeof(int32_t);
  CheckOverlap(Role::kOffsets, MemorySpan{ends, ends + length, length, 0, 0}, sums, Role::kSums);
}

// Copies one row for all rows: [n], or with leading dimensions of extent 1 or stride 0, as from
// expand().
void Checker::CopyRow(const DLTensor& from) const {
  const TensorView& result = call_[Role::kOut];
  const int64_t n = ProductColumns();
  const int last = from.ndim - 1;
  bool fits = from.ndim >= 1 && from.ndim <= spec_.out_rank() && from.shape[last] == n &&
              (n == 1 || from.strides == nullptr || from.strides[last] == 1);
  for (int i = 0; fits && i < last; ++i) {
    const int64_t extent = result.shape[i + spec_.out_rank() - from.ndim];
    fits = from.shape[i] == 1 ||
           (from.shape[i] == extent && from.strides != nullptr && from.strides[i] == 0);
  }
  if (!fits) {
    Refuse(kValueError, "addend has shape ", ShapeText(from), " and strides ", StridesText(from),
           "; must be one contiguous row of ", n, " for all rows: of shape (", n,
           "), or expanded to that of the product");
  }
  CheckDType(Role::kAddend, from, spec_.addend_dtype);
  TensorView& to = call_[Role::kAddend];
  to.tensor = from;
  to.tensor.ndim = 1;
  to.shape[0] = n;
  to.strides[0] = 1;
  to.tensor.shape = to.shape;
  to.tensor.strides = to.strides;
}

void Checker::CopyAsVector(Role role, const DLTensor& from, DLDataType dtype, int64_t elements,
                           const char* why) const {
  CheckDType(role, from, dtype);
  if (ElementsOf(from) != elements || !IsCompact(from)) {
    Refuse(kValueError, RoleName(role), " has shape ", ShapeText(from), " and strides ",
           StridesText(from), "; must have ", elements, " contiguous elements: ", why);
  }
  TensorView& to = call_[role];
  to.tensor = from;
  to.tensor.ndim = 1;
  to.shape[0] = elements;
  to.strides[0] = 1;
  to.tensor.shape = to.shape;
  to.tensor.strides = to.strides;
}

// Checks the address of contiguous elements.
void Checker::CheckVector(Role role, int64_t elements, int64_t alignment_bytes,
                          const MemorySpan& out) const {
  const TensorView& view = call_[role];
  CheckDevice(role, view.tensor);
  const uintptr_t begin = CheckAddress(role, alignment_bytes);
  const uintptr_t end = EndOf(role, begin, elements, ElementBytes(view.tensor.dtype));
  CheckOverlap(role, MemorySpan{begin, end, end - begin, 0, 0}, out);
}

}  // namespace nvgemm
