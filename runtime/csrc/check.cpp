#include "check.h"

#include <string>

#include "checker.h"

namespace nvgemm {
namespace {

int64_t Reach(const TensorView& view, int dimension) {
  return (view.shape[dimension] - 1) * view.strides[dimension];
}

}  // namespace

void Checker::CheckAll(const Operands& operands) const {
  if (operands.extras() != spec_.extras) CheckGiven(operands);
  const TensorView& a = Copy(Role::kA, operands[Role::kA], spec_.rank(), spec_.a_dtype);
  const TensorView& b = Copy(Role::kB, operands[Role::kB], spec_.b_rank(), spec_.b_dtype);
  const TensorView& out = Copy(Role::kOut, operands[Role::kOut], spec_.rank(), spec_.out_dtype);
  CheckShapes();
  CheckDevice(Role::kA, a.tensor);
  CheckDevice(Role::kB, b.tensor);
  CheckDevice(Role::kOut, out.tensor);
  const int64_t batch = spec_.op == Op::kBmm ? out.shape[0] : 1;
  call_.out_is_empty = batch == 0 || out.shape[rows_] == 0 || out.shape[columns_] == 0;
  call_.sum_is_empty = a.shape[columns_] == 0 || (spec_.op == Op::kGroupedMm && b.shape[0] == 0);
  if (call_.out_is_empty) return;
  if (call_.sum_is_empty && spec_.addend != AddendKind::kNone) {
    Refuse(kValueError, "k is 0, so that the result is what is added alone; no kernel is needed, "
           "and this one computes no such thing: add it with torch");
  }
  const MemorySpan out_span = CheckLayout(Role::kOut, true);
  if (call_.sum_is_empty) return;
  const MemorySpan a_span = CheckLayout(Role::kA, spec_.a_row_major);
  const MemorySpan b_span = CheckLayout(Role::kB, spec_.b_row_major);
  CheckOverlap(Role::kA, a_span, out_span);
  CheckOverlap(Role::kB, b_span, out_span);
  if (spec_.extras != 0) CheckExtras(operands, out_span);
  if (spec_.needs_compact) CheckCompact();
}

void Checker::CheckGiven(const Operands& operands) const {
  std::string taken;
  for (const Role role : kExtras) {
    if ((spec_.extras & SetOf(role)) != 0) taken += Text(taken.empty() ? "" : ", ", RoleName(role));
  }
  for (const Role role : kExtras) {
    const bool given = (operands.extras() & SetOf(role)) != 0;
    if (given == ((spec_.extras & SetOf(role)) != 0)) continue;
    Refuse(kTypeError, RoleName(role), " is ", given ? "given" : "missing",
           "; besides a, b and out the kernel takes ", taken.empty() ? "nothing" : taken.c_str());
  }
}

void Checker::CheckDType(Role role, const DLTensor& from, DLDataType dtype) const {
  if (SameDType(from.dtype, dtype)) return;
  Refuse(kTypeError, RoleName(role), " is ", DTypeText(from.dtype), "; must be ", DTypeText(dtype));
}

TensorView& Checker::Copy(Role role, const DLTensor& from, int rank, DLDataType dtype) const {
  if (from.ndim != rank) {
    Refuse(kValueError, RoleName(role), " has ", from.ndim, " dimensions, shape ", ShapeText(from),
           "; must have ", rank);
  }
  CheckDType(role, from, dtype);
  TensorView& to = call_[role];
  to.tensor = from;
  int64_t compact = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (from.shape[i] < 0 || from.shape[i] > kMaxExtent) {
      Refuse(kValueError, RoleName(role), " has shape ", ShapeText(from),
             "; each extent must be in 0..", kMaxExtent);
    }
    to.shape[i] = from.shape[i];
    // DLPack before 1.2 lets row-major tensors come without strides.
    to.strides[i] = from.strides != nullptr ? from.strides[i] : compact;
    if (__builtin_mul_overflow(compact, from.shape[i], &compact)) compact = kMaxExtent + 1;
  }
  to.tensor.shape = to.shape;
  to.tensor.strides = to.strides;
  return to;
}

void Checker::CheckShapes() const {
  const TensorView& a = call_[Role::kA];
  const TensorView& b = call_[Role::kB];
  const TensorView& out = call_[Role::kOut];
  const int b_rows = spec_.b_rank() - 2;
  const bool agree = a.shape[columns_] == b.shape[b_rows] && a.shape[rows_] == out.shape[rows_] &&
                     b.shape[b_rows + 1] == out.shape[columns_] &&
                     (spec_.op != Op::kBmm || (a.shape[0] == b.shape[0] && a.shape[0] == out.shape[0]));
  if (agree) return;
  const char* form = spec_.op == Op::kMm    ? "(m, k), (k, n) and (m, n)"
                     : spec_.op == Op::kBmm ? "(batch, m, k), (batch, k, n) and (batch, m, n)"
                                            : "(m, k), (groups, k, n) and (m, n)";
  Refuse(kValueError, "shapes of a, b and out are ", ShapeText(a.tensor), ", ",
         ShapeText(b.tensor), " and ", ShapeText(out.tensor), "; must be ", form);
}

void Checker::CheckDevice(Role role, const DLTensor& tensor) const {
  const DLDevice device = tensor.device;
  if (device.device_type != spec_.device_type) {
    Refuse(kValueError, RoleName(role), " is on ", DeviceText(device), "; the kernel runs on ",
           spec_.device_type == kDLCPU ? "cpu" : "cuda");
  }
  const DLDevice wanted = call_[Role::kA].tensor.device;
  if (device.device_id != wanted.device_id) {
    Refuse(kValueError, RoleName(role), " is on ", DeviceText(device), " and a on ",
           DeviceText(wanted), "; all must be on one device");
  }
}

// Checks strides and alignment of a view that has elements, and makes its strides canonical.
MemorySpan Checker::CheckLayout(Role role, bool row_major) const {
  TensorView& view = call_[role];
  const char* const name = RoleName(role);
  const int rank = view.tensor.ndim;
  const int inner = row_major ? rank - 1 : rank - 2;
  const int outer = row_major ? rank - 2 : rank - 1;
  const int64_t element_bytes = ElementBytes(view.tensor.dtype);
  const int64_t step = spec_.alignment_bytes > element_bytes
                           ? spec_.alignment_bytes / element_bytes
                           : 1;
  const int64_t inner_extent = view.shape[inner];
  if (inner_extent % step != 0) {
    Refuse(kValueError, name, " has ", inner_extent, " elements along dimension ", inner,
           ", which is contiguous; must be a multiple of ", step, " (", spec_.alignment_bytes,
           " bytes); pad it or use another kernel");
  }
  if (inner_extent > 1 && view.strides[inner] != 1) {
    Refuse(kValueError, name, " has stride ", view.strides[inner], " along dimension ", inner,
           "; must be 1, for the kernel wants ", name, row_major ? " row" : " column",
           "-major; copy it into that layout or use another kernel");
  }
  view.strides[inner] = 1;
  CheckStride(role, outer, step, inner_extent);
  if (rank == 3) CheckStride(role, 0, step, inner_extent);
  const int64_t matrix = Reach(view, outer) + inner_extent;
  const int64_t batch_stride = rank == 3 ? view.strides[0] : 0;
  const bool several = rank == 3 && view.shape[0] > 1;
  // Matrices lie one behind the other, or each row of one lies between the rows of the others.
  if ((view.shape[outer] > 1 && view.strides[outer] < inner_extent) ||
      (several && batch_stride < matrix &&
       (batch_stride < inner_extent ||
        view.strides[outer] < Reach(view, 0) + inner_extent))) {
    Refuse(kValueError, name, " has shape ", ShapeText(view.tensor), " and strides ",
           StridesText(view.tensor),
           ", so that elements share memory; make a copy with .contiguous()");
  }
  const int64_t elements = matrix + (several ? Reach(view, 0) : 0);
  return Locate(role, elements, several, outer, inner_extent);
}

void Checker::CheckStride(Role role, int dimension, int64_t step, int64_t inner_extent) const {
  TensorView& view = call_[role];
  int64_t& stride = view.strides[dimension];
  if (view.shape[dimension] == 1) {
    stride = inner_extent;  // a multiple of `step`, small, and as in a compact tensor
    return;
  }
  if (stride <= 0 || stride > kMaxExtent || stride % step != 0) {
    Refuse(kValueError, RoleName(role), " has stride ", stride, " along dimension ", dimension,
           "; must be a multiple of ", step, " elements (", spec_.alignment_bytes,
           " bytes) in 1..", kMaxExtent,
           "; make a copy with .contiguous() or use another kernel");
  }
}

uintptr_t Checker::CheckAddress(Role role, int64_t alignment_bytes) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(call_[role].data());
  const uintptr_t alignment = static_cast<uintptr_t>(alignment_bytes);
  if (begin == 0 || begin % alignment != 0) {
    Refuse(kValueError, RoleName(role), " begins ",
           begin == 0 ? std::string("at a null pointer, as fake and functional tensors do")
                      : Text(begin % alignment, " bytes behind an aligned address"),
           "; must begin at a multiple of ", alignment,
           " bytes; make a copy with .clone() or use another kernel");
  }
  return begin;
}

uintptr_t Checker::EndOf(Role role, uintptr_t begin, int64_t elements,
                         int64_t element_bytes) const {
  uintptr_t bytes = 0;
  uintptr_t end = 0;
  if (__builtin_mul_overflow(elements, element_bytes, &bytes) ||
      __builtin_add_overflow(begin, bytes, &end)) {
    Refuse(kValueError, RoleName(role), " reaches over ", elements,
           " elements, behind the end of the address space");
  }
  return end;
}

MemorySpan Checker::Locate(Role role, int64_t elements, bool several, int outer,
                           int64_t inner_extent) const {
  const TensorView& view = call_[role];
  const int64_t element_bytes = ElementBytes(view.tensor.dtype);
  const uintptr_t begin = CheckAddress(role, spec_.alignment_bytes);
  const uintptr_t end = EndOf(role, begin, elements, element_bytes);
  const auto pitch = [&](int dimension) {
    return static_cast<uintptr_t>(view.strides[dimension] * element_bytes);
  };
  return MemorySpan{begin, end, static_cast<uintptr_t>(inner_extent * element_bytes),
                    view.shape[outer] > 1 ? pitch(outer) : 0, several ? pitch(0) : 0};
}

void Checker::CheckOverlap(Role role, const MemorySpan& input, const MemorySpan& out) const {
  if (!MayOverlap(input, out)) return;
  const bool out_first = out.begin < input.begin;
  Refuse(kValueError, "out overlaps ", RoleName(role), ": their memory is ", out.end - out.begin,
         " and ", input.end - input.begin, " bytes long, and out begins ",
         out_first ? input.begin - out.begin : out.begin - input.begin, " bytes ",
         out_first ? "before " : "behind ", "the beginning of ", RoleName(role),
         "; pass an out with memory of its own");
}

// Strides are canonical by now.
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
           StridesText(view.tensor), "; must lie without gaps, for the kernel is given no strides; "
           "make a copy in the same layout or use another kernel");
  }
}

bool MayOverlap(const MemorySpan& x, const MemorySpan& y) {
  if (x.end <= y.begin || y.end <= x.begin) return false;
  // Slices of one buffer by columns interleave without meeting: where every distance of rows and of
  // matrices is a multiple of one pitch, each view fills one interval modulo that pitch, and the
  // two intervals must be apart.
  const uintptr_t pitches[] = {x.row_pitch, y.row_pitch, x.batch_pitch, y.batch_pitch};
  uintptr_t pitch = 0;
  for (const uintptr_t candidate : pitches) {
    if (pitch == 0) pitch = candidate;
    if (pitch != 0 && candidate % pitch != 0) return true;
  }
  if (pitch == 0) return true;
  const uintptr_t apart = y.begin >= x.begin ? (y.begin - x.begin) % pitch
                                             : (pitch - (x.begin - y.begin) % pitch) % pitch;
  return apart < x.row_bytes || apart + y.row_bytes > pitch;
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
