#include "checks/check.h"

#include <string>

#include "checks/checker.h"

namespace nvgemm {
namespace {

bool IsRatioOf(GateForm form, int64_t product, int64_t out) {
  const ColumnRatio ratio = RatioOf(form);
  return product * ratio.out == out * ratio.product;  // both below 2^31
}

const char* OutColumnsText(GateForm form) {
  constexpr const char* kTexts[] = {"n)", "n / 2)", "n + n / 2)", "2 n)", "2 n)", "2 n)"};
  return kTexts[static_cast<int>(form)];
}

}  // namespace

void Checker::CheckAll(const Operands& operands) const {
  if (operands.extras() != spec_.extras) CheckExtraRoles(operands);
  const TensorView& a = Copy(Role::kA, operands[Role::kA], spec_.a_rank(), spec_.a_dtype);
  const TensorView& b = Copy(Role::kB, operands[Role::kB], spec_.b_rank(), spec_.b_dtype);
  const TensorView& out = Copy(Role::kOut, operands[Role::kOut], spec_.out_rank(), spec_.out_dtype);
  CheckShapes();
  CheckDevice(Role::kA, a.tensor);
  CheckDevice(Role::kB, b.tensor);
  CheckDevice(Role::kOut, out.tensor);
  const int64_t batch = spec_.out_rank() == 3 ? out.shape[0] : 1;
  call_.out_is_empty = batch == 0 || out.shape[rows_] == 0 || out.shape[columns_] == 0;
  const int64_t k = a.shape[spec_.a_rank() - 1];
  const bool needs_b = GroupsRows(spec_.op) || spec_.op == Op::kGatheredMm;
  const bool needs_a = spec_.op == Op::kGatheredGroupedMm;  // gathers rows from a
  call_.sum_is_empty = k == 0 || (needs_b && b.shape[0] == 0) || (needs_a && a.shape[0] == 0);
  if (call_.out_is_empty) return;
  const bool adds = spec_.addend != AddendKind::kNone && !ReadsAddend(spec_.form);
  if (k == 0 && adds) {
    Refuse(kValueError, "k is 0, so the result is the addend, which this kernel does not compute; "
           "use torch");
  }
  const MemorySpan out_span = CheckLayout(Role::kOut, true);
  CheckParts();
  if (call_.sum_is_empty) return;
  const MemorySpan a_span = CheckLayout(Role::kA, spec_.a_row_major);
  const MemorySpan b_span = CheckLayout(Role::kB, spec_.b_row_major);
  CheckOverlap(Role::kA, a_span, out_span);
  CheckOverlap(Role::kB, b_span, out_span);
  if (spec_.extras != 0) CheckExtras(operands, out_span);
  if (spec_.needs_compact) CheckCompact();
}

void Checker::CheckExtraRoles(const Operands& operands) const {
  std::string taken = "a, b, out";
  for (const Role role : kExtras) {
    if ((spec_.extras & SetOf(role)) != 0) taken += Text(", ", RoleName(role));
  }
  for (const Role role : kExtras) {
    const bool is_present = (operands.extras() & SetOf(role)) != 0;
    if (is_present == ((spec_.extras & SetOf(role)) != 0)) continue;
    Refuse(kTypeError, RoleName(role), " is ", is_present ? "given" : "missing",
           "; the kernel takes ", taken);
  }
}

void Checker::CheckShapes() const {
  const TensorView& a = call_[Role::kA];
  const TensorView& b = call_[Role::kB];
  const TensorView& out = call_[Role::kOut];
  const int b_rows = spec_.b_rank() - 2;
  const int a_rows = spec_.a_rank() - 2;
  const bool gathers_b = spec_.op == Op::kGatheredMm;  // b may have any number of rows
  const bool gathers_a = spec_.op == Op::kGatheredGroupedMm;
  const bool agree = (gathers_b || a.shape[a_rows + 1] == b.shape[b_rows]) &&
                     (gathers_a || a.shape[a_rows] == out.shape[rows_]) &&
                     IsRatioOf(spec_.form, b.shape[b_rows + 1], out.shape[columns_]) &&
                     (spec_.op != Op::kBmm || (a.shape[0] == b.shape[0] && a.shape[0] == out.shape[0]));
  if (agree) return;
  const char* form =
      spec_.op == Op::kBmm ? "(batch, m, k), (batch, k, n) and (batch, m, n)"
      : spec_.op == Op::kKGroupedMm ? "(m, k), (k, n) and (groups, m, n)"
      : gathers_b ? "(m, k), (any, n) and (m, n)"
      : gathers_a ? "(any, k), (groups, k, n) and (m, "
      : spec_.op == Op::kGroupedMm ? "(m, k), (groups, k, n) and (m, "
                                   : "(m, k), (k, n) and (m, ";
  const bool has_columns = spec_.op == Op::kMm || GroupsRows(spec_.op);
  Refuse(kValueError, "shapes of a, b and out are ", ShapeText(a.tensor), ", ",
         ShapeText(b.tensor), " and ", ShapeText(out.tensor), "; must be ", form,
         has_columns ? OutColumnsText(spec_.form) : "");
}

// Gradients for gates and for ups may be stored as two matrices with n columns each, as may ups and
// gated values. For the other forms, an aligned result has aligned parts.
void Checker::CheckParts() const {
  if (!ReadsAddend(spec_.form)) return;
  const int64_t n = ProductColumns();
  const int64_t step = spec_.alignment_bytes / ElementBytes(spec_.out_dtype);
  if (step < 2 || n % step == 0) return;
  Refuse(kValueError, "b has ", n, " columns, and out twice as many; n must be a multiple of ", step,
         " (", spec_.alignment_bytes, " bytes)");
}

// Requires canonical strides.
void Checker::CheckCompact() const {
  constexpr Role kWithStrides[] = {Role::kA, Role::kB, Role::kOut};
  for (const Role role : kWithStrides) {
    const TensorView& view = call_[role];
    const int rank = view.tensor.ndim;
    const bool row_major = role == Role::kOut || (role == Role::kA ? spec_.a_row_major
                                                                   : spec_.b_row_major);
    const int inner = row_major ? rank - 1 : rank - 2;
    const int outer = row_major ? rank - 2 : rank - 1;
    const int64_t matrix = view.shape[inner] * view.shape[outer];
    if (view.strides[outer] == view.shape[inner] &&
        (rank == 2 || view.shape[0] == 1 || view.strides[0] == matrix)) {
      continue;
    }
    Refuse(kValueError, RoleName(role), " has shape ", ShapeText(view.tensor), " and strides ",
           StridesText(view.tensor), "; must have no gaps, because the kernel takes no strides; "
           "make a copy in the same layout or use another kernel");
  }
}

bool MayOverlap(const MemorySpan& x, const MemorySpan& y) {
  if (x.end <= y.begin || y.end <= x.begin) return false;
  // Column slices of one buffer interleave without sharing bytes. If every row and matrix distance
  // is a multiple of one pitch, each view fills one interval modulo that pitch, and the two
  // intervals must be disjoint.
  const uintptr_t pitches[] = {x.row_pitch, y.row_pitch, x.batch_pitch, y.batch_pitch};
  uintptr_t pitch = 0;
  for (const uintptr_t candidate : pitches) {
    if (pitch == 0) pitch = candidate;
    if (pitch != 0 && candidate % pitch != 0) return true;
  }
  if (pitch == 0) return true;
  const uintptr_t distance = y.begin >= x.begin ? (y.begin - x.begin) % pitch
                                             : (pitch - (x.begin - y.begin) % pitch) % pitch;
  return distance < x.row_bytes || distance + y.row_bytes > pitch;
}

void CheckOperands(const KernelSpec& spec, const Operands& operands, CheckedCall* call) {
  Checker(spec, call, /*quiet=*/false).CheckAll(operands);
}

bool OperandsPass(const KernelSpec& spec, const Operands& operands, CheckedCall* call) {
  try {
    Checker(spec, call, /*quiet=*/true).CheckAll(operands);
  } catch (const Refused&) {
    return false;
  }
  return true;
}

}  // namespace nvgemm
