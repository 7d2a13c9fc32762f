// Checks for one launch, tensor by tensor. Included only by check*.cpp.

#ifndef NVGEMM_RUNTIME_CSRC_CHECKER_H_
#define NVGEMM_RUNTIME_CSRC_CHECKER_H_

#include <string>

#include "checks/check.h"
#include "core/failure.h"

namespace nvgemm {

// Kernels take extents as signed 32-bit integers. Strides have the same limit, because a compiled
// kernel does not tell if it supports wider ones.
inline constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;

// Alignment that kernels assume for data read by the element (a single scale, int32 offsets and
// rows, and a of gathered rows), in bytes.
inline constexpr int64_t kElementAlignment = 4;

std::string DTypeText(DLDataType dtype);
std::string DeviceText(DLDevice device);
std::string ShapeText(const DLTensor& tensor);
std::string StridesText(const DLTensor& tensor);

// Thrown instead of Failure if the caller needs no message, which takes time to build.
struct Refused {};

// Dimensions count from the end, because a batch or groups may precede them: for out, `rows` is
// rank - 2 and `columns` is rank - 1.
class Checker {
 public:
  Checker(const KernelSpec& spec, CheckedCall* call, bool quiet)
      : spec_(spec), call_(*call), quiet_(quiet), rows_(spec.out_rank() - 2), columns_(spec.out_rank() - 1) {}

  void CheckAll(const Operands& operands) const;

 private:
  // Product columns; with a gate, the result has a different number.
  int64_t ProductColumns() const { return call_[Role::kB].shape[spec_.b_rank() - 1]; }

  // Matrix alignment in bytes, for its address, contiguous extent and other strides.
  int64_t AlignmentOf(Role role) const {
    const bool by_element = spec_.op == Op::kGatheredMm && role == Role::kA;
    return by_element ? kElementAlignment : spec_.alignment_bytes;
  }

  template <typename... Parts>
  [[noreturn, gnu::cold, gnu::noinline]] void Refuse(const char* kind, const Parts&... parts) const {
    if (quiet_) throw Refused();
    throw Failure(kind, Text("kernel ", ShortId(spec_.id), " (", OpName(spec_.op), "): ", parts...));
  }

  // Defined in check.cpp.
  void CheckExtraRoles(const Operands& operands) const;
  void CheckShapes() const;
  void CheckParts() const;
  void CheckCompact() const;

  // Defined in check_extras.cpp.
  void CheckExtras(const Operands& operands, const MemorySpan& out) const;
  void CheckScale(Role role, const DLTensor& from, const MemorySpan& out) const;
  void CheckRowScale(Role role, const DLTensor& from, int64_t rows) const;
  void CheckRowScaleOfGroups(Role role, const DLTensor& from, int64_t rows) const;
  void CheckOffsets(const DLTensor& from, const MemorySpan& out) const;
  void CheckRows(const DLTensor& from, const MemorySpan& out) const;
  void CheckAddend(const DLTensor& from, const MemorySpan& out) const;
  void CheckGates(const DLTensor& from, const MemorySpan& out) const;
  void CheckRowsOfGroups(const DLTensor& from, const MemorySpan& out) const;
  void CheckSums(const DLTensor& from, const MemorySpan& out) const;
  void CopyRow(const DLTensor& from) const;
  void CopyAsVector(Role role, const DLTensor& from, DLDataType dtype, int64_t elements,
                    const char* why) const;
  void CheckVector(Role role, int64_t elements, int64_t alignment_bytes,
                   const MemorySpan& out) const;

  // Shared. Defined in the header for inlining, because every launch runs them.

  void CheckDType(Role role, const DLTensor& from, DLDataType dtype) const {
    if (SameDType(from.dtype, dtype)) return;
    Refuse(kTypeError, RoleName(role), " is ", DTypeText(from.dtype), "; must be ", DTypeText(dtype));
  }

  TensorView& Copy(Role role, const DLTensor& from, int rank, DLDataType dtype) const {
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
      // Before DLPack 1.2, row-major tensors may have no strides.
      to.strides[i] = from.strides != nullptr ? from.strides[i] : compact;
      if (__builtin_mul_overflow(compact, from.shape[i], &compact)) compact = kMaxExtent + 1;
    }
    to.tensor.shape = to.shape;
    to.tensor.strides = to.strides;
    return to;
  }

  void CheckDevice(Role role, const DLTensor& tensor) const {
    const DLDevice device = tensor.device;
    if (device.device_type != spec_.device_type) {
      Refuse(kValueError, RoleName(role), " is on ", DeviceText(device), "; the kernel runs on ",
             spec_.device_type == kDLCPU ? "cpu" : "cuda");
    }
    const DLDevice a_device = call_[Role::kA].tensor.device;
    if (device.device_id != a_device.device_id) {
      Refuse(kValueError, RoleName(role), " is on ", DeviceText(device), " and a on ",
             DeviceText(a_device), "; all must be on one device");
    }
  }

  // Checks the strides and alignment of a nonempty view, and makes its strides canonical.
  MemorySpan CheckLayout(Role role, bool row_major) const {
    TensorView& view = call_[role];
    const char* const name = RoleName(role);
    const int rank = view.tensor.ndim;
    const int inner = row_major ? rank - 1 : rank - 2;
    const int outer = row_major ? rank - 2 : rank - 1;
    const int64_t element_bytes = ElementBytes(view.tensor.dtype);
    const int64_t alignment = AlignmentOf(role);
    const int64_t step = alignment > element_bytes ? alignment / element_bytes : 1;
    const int64_t inner_extent = view.shape[inner];
    if (inner_extent % step != 0) {
      Refuse(kValueError, name, " has ", inner_extent, " elements along dimension ", inner,
             ", which is contiguous; must be a multiple of ", step, " (", alignment, " bytes); pad it or use another kernel");
    }
    if (inner_extent > 1 && view.strides[inner] != 1) {
      Refuse(kValueError, name, " has stride ", view.strides[inner], " along dimension ", inner,
             "; must be 1, because the kernel takes ", name, row_major ? " row" : " column",
             "-major; copy it into that layout or use another kernel");
    }
    view.strides[inner] = 1;
    CheckStride(role, outer, step, inner_extent);
    if (rank == 3) CheckStride(role, 0, step, inner_extent);
    const int64_t matrix = Reach(view, outer) + inner_extent;
    const int64_t batch_stride = rank == 3 ? view.strides[0] : 0;
    const bool several = rank == 3 && view.shape[0] > 1;
    // Matrices follow each other, or their rows interleave.
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

  void CheckStride(Role role, int dimension, int64_t step, int64_t inner_extent) const {
    TensorView& view = call_[role];
    int64_t& stride = view.strides[dimension];
    if (view.shape[dimension] == 1) {
      stride = inner_extent;  // a multiple of `step`, small, and as in a compact tensor
      return;
    }
    if (stride <= 0 || stride > kMaxExtent || stride % step != 0) {
      Refuse(kValueError, RoleName(role), " has stride ", stride, " along dimension ", dimension,
             "; must be a multiple of ", step, " elements (", AlignmentOf(role), " bytes) in 1..", kMaxExtent,
             "; make a copy with .contiguous() or use another kernel");
    }
  }

  uintptr_t CheckAddress(Role role, int64_t alignment_bytes) const {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(call_[role].data());
    const uintptr_t alignment = static_cast<uintptr_t>(alignment_bytes);
    if (begin == 0 || begin % alignment != 0) {
      Refuse(kValueError, RoleName(role), " begins ",
             begin == 0 ? std::string("at a null pointer, as fake and functional tensors do")
                        : Text(begin % alignment, " bytes past an aligned address"),
             "; must begin at a multiple of ", alignment,
             " bytes; make a copy with .clone() or use another kernel");
    }
    return begin;
  }

  uintptr_t EndOf(Role role, uintptr_t begin, int64_t elements, int64_t element_bytes) const {
    uintptr_t bytes = 0;
    uintptr_t end = 0;
    if (__builtin_mul_overflow(elements, element_bytes, &bytes) ||
        __builtin_add_overflow(begin, bytes, &end)) {
      Refuse(kValueError, RoleName(role), " reaches over ", elements,
             " elements, past the end of the address space");
    }
    return end;
  }

  MemorySpan Locate(Role role, int64_t elements, bool several, int outer,
                    int64_t inner_extent) const {
    const TensorView& view = call_[role];
    const int64_t element_bytes = ElementBytes(view.tensor.dtype);
    const uintptr_t begin = CheckAddress(role, AlignmentOf(role));
    const uintptr_t end = EndOf(role, begin, elements, element_bytes);
    const auto pitch = [&](int dimension) {
      return static_cast<uintptr_t>(view.strides[dimension] * element_bytes);
    };
    return MemorySpan{begin, end, static_cast<uintptr_t>(inner_extent * element_bytes),
                      view.shape[outer] > 1 ? pitch(outer) : 0, several ? pitch(0) : 0};
  }

  // Returns true if two equally shaped matrices have each element at the same address.
  static bool IsSameMatrix(const MemorySpan& x, const MemorySpan& y) {
    return x.begin == y.begin && x.end == y.end && x.row_pitch == y.row_pitch;
  }

  void CheckOverlap(Role role, const MemorySpan& input, const MemorySpan& out,
                    Role written = Role::kOut) const {
    if (!MayOverlap(input, out)) return;
    const bool out_first = out.begin < input.begin;
    Refuse(kValueError, RoleName(written), " overlaps ", RoleName(role), ": their memory is ",
           out.end - out.begin, " and ", input.end - input.begin, " bytes long, and ",
           RoleName(written), " begins ",
           out_first ? input.begin - out.begin : out.begin - input.begin, " bytes ",
           out_first ? "before " : "after ", "the beginning of ", RoleName(role), "; pass ",
           written == Role::kOut ? "an out" : RoleName(written), " with separate memory");
  }

  static int64_t Reach(const TensorView& view, int dimension) {
    return (view.shape[dimension] - 1) * view.strides[dimension];
  }

  const KernelSpec& spec_;
  CheckedCall& call_;
  const bool quiet_;
  const int rows_;
  const int columns_;
};

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_CHECKER_H_
