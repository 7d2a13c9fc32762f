#include "check.h"

#include <string>

#include "failure.h"

namespace nvgemm {
namespace {

// Kernels take extents as signed 32-bit integers. Their strides are held to the same limit, for
// nothing that a compiled kernel says about itself shows that it computes with wider ones.
constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;

std::string DTypeText(DLDataType dtype) {
  const char* name = "dtype";
  switch (dtype.code) {
    case kDLInt: name = "int"; break;
    case kDLUInt: name = "uint"; break;
    case kDLFloat: name = "float"; break;
    case kDLBfloat: name = "bfloat"; break;
    case kDLComplex: name = "complex"; break;
    case kDLBool: return "bool";
    case kDLOpaqueHandle: return "of a dtype that no kernel takes";  // ViewOf(OwnedTensor)
    case kDLFloat8_e4m3fn: return "float8_e4m3fn";
    case kDLFloat8_e5m2: return "float8_e5m2";
    default: return Text("dtype(code ", dtype.code, ", bits ", dtype.bits, ", lanes ",
                         dtype.lanes, ")");
  }
  std::string text = Text(name, dtype.bits);
  if (dtype.lanes != 1) text += Text("x", dtype.lanes);
  return text;
}

std::string DeviceText(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  if (device.device_type == kDLCUDA) return Text("cuda:", device.device_id);
  return Text("device type ", static_cast<int>(device.device_type), " (DLPack), index ",
              device.device_id);
}

std::string ShapeText(const DLTensor& tensor) {
  std::string text = "(";
  for (int i = 0; i < tensor.ndim; ++i) text += Text(i == 0 ? "" : ", ", tensor.shape[i]);
  return text + ")";
}

// How a check fails where nobody asks why: without the cost of a message.
struct Refused {};

// Checks one operand after the other. Dimensions are counted from the end, since a batch is in
// front: `rows` is rank - 2 and `columns` is rank - 1.
class Checker {
 public:
  Checker(const KernelSpec& spec, CheckedCall* call, bool quiet)
      : spec_(spec), call_(call), quiet_(quiet), rows_(spec.rank - 2), columns_(spec.rank - 1) {}

  void CheckAll(const DLTensor& a, const DLTensor& b, const DLTensor& out) const {
    Copy("a", a, spec_.a_dtype, &call_->a);
    Copy("b", b, spec_.b_dtype, &call_->b);
    Copy("out", out, spec_.out_dtype, &call_->out);
    CheckShapes();
    CheckDevice("a", call_->a);
    CheckDevice("b", call_->b);
    CheckDevice("out", call_->out);
    const int64_t* out_shape = call_->out.shape;
    const int64_t batch = spec_.rank == 3 ? out_shape[0] : 1;
    call_->out_is_empty = batch == 0 || out_shape[rows_] == 0 || out_shape[columns_] == 0;
    call_->k_is_zero = call_->a.shape[columns_] == 0;
    if (call_->out_is_empty) return;
    const MemorySpan out_span = CheckLayout("out", true, &call_->out);
    if (call_->k_is_zero) return;
    const MemorySpan a_span = CheckLayout("a", spec_.a_row_major, &call_->a);
    const MemorySpan b_span = CheckLayout("b", spec_.b_row_major, &call_->b);
    CheckOverlap("a", a_span, out_span);
    CheckOverlap("b", b_span, out_span);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void Refuse(const char* kind, const Parts&... parts) const {
    if (quiet_) throw Refused();
    throw Failure(kind, Text("kernel ", ShortId(spec_.id), " (",
                             spec_.rank == 2 ? "mm" : "bmm", "): ", parts...));
  }

  void Copy(const char* name, const DLTensor& from, DLDataType dtype, TensorView* to) const {
    if (from.ndim != spec_.rank) {
      Refuse(kValueError, name, " has ", from.ndim, " dimensions, shape ", ShapeText(from),
             "; must have ", spec_.rank);
    }
    if (from.dtype.code != dtype.code || from.dtype.bits != dtype.bits ||
        from.dtype.lanes != dtype.lanes) {
      Refuse(kTypeError, name, " is ", DTypeText(from.dtype), "; must be ", DTypeText(dtype));
    }
    to->tensor = from;
    int64_t compact = 1;
    for (int i = spec_.rank - 1; i >= 0; --i) {
      if (from.shape[i] < 0 || from.shape[i] > kMaxExtent) {
        Refuse(kValueError, name, " has shape ", ShapeText(from), "; each extent must be in 0..",
               kMaxExtent);
      }
      to->shape[i] = from.shape[i];
      // DLPack before 1.2 lets row-major tensors come without strides.
      to->strides[i] = from.strides != nullptr ? from.strides[i] : compact;
      if (__builtin_mul_overflow(compact, from.shape[i], &compact)) compact = kMaxExtent + 1;
    }
    to->tensor.shape = to->shape;
    to->tensor.strides = to->strides;
  }

  void CheckShapes() const {
    const int64_t* a = call_->a.shape;
    const int64_t* b = call_->b.shape;
    const int64_t* out = call_->out.shape;
    const bool agree = a[columns_] == b[rows_] && a[rows_] == out[rows_] &&
                       b[columns_] == out[columns_] &&
                       (spec_.rank == 2 || (a[0] == b[0] && a[0] == out[0]));
    if (agree) return;
    const char* form = spec_.rank == 2 ? "(m, k), (k, n) and (m, n)"
                                       : "(batch, m, k), (batch, k, n) and (batch, m, n)";
    Refuse(kValueError, "shapes of a, b and out are ", ShapeText(call_->a.tensor), ", ",
           ShapeText(call_->b.tensor), " and ", ShapeText(call_->out.tensor), "; must be ", form);
  }

  void CheckDevice(const char* name, const TensorView& view) const {
    const DLDevice device = view.tensor.device;
    if (device.device_type != spec_.device_type) {
      Refuse(kValueError, name, " is on ", DeviceText(device), "; the kernel runs on ",
             spec_.device_type == kDLCPU ? "cpu" : "cuda");
    }
    const DLDevice wanted = call_->a.tensor.device;
    if (device.device_id != wanted.device_id) {
      Refuse(kValueError, name, " is on ", DeviceText(device), " and a on ", DeviceText(wanted),
             "; all must be on one device");
    }
  }

  // Checks strides and alignment of a view that has elements, and makes its strides canonical.
  MemorySpan CheckLayout(const char* name, bool row_major, TensorView* view) const {
    const int inner = row_major ? columns_ : rows_;
    const int outer = row_major ? rows_ : columns_;
    const int64_t element_bytes = view->tensor.dtype.bits / 8;
    const int64_t step = spec_.alignment_bytes > element_bytes
                             ? spec_.alignment_bytes / element_bytes
                             : 1;
    const int64_t inner_extent = view->shape[inner];
    if (inner_extent % step != 0) {
      Refuse(kValueError, name, " has ", inner_extent, " elements along dimension ", inner,
             ", which is contiguous; must be a multiple of ", step, " (", spec_.alignment_bytes,
             " bytes); pad it or use another kernel");
    }
    if (inner_extent > 1 && view->strides[inner] != 1) {
      Refuse(kValueError, name, " has stride ", view->strides[inner], " along dimension ", inner,
             "; must be 1, for the kernel wants ", name, row_major ? " row" : " column",
             "-major; copy it into that layout or use another kernel");
    }
    view->strides[inner] = 1;
    CheckStride(name, outer, step, inner_extent, view);
    if (spec_.rank == 3) CheckStride(name, 0, step, inner_extent, view);
    const int64_t matrix = Reach(*view, outer) + inner_extent;
    const int64_t batch_stride = spec_.rank == 3 ? view->strides[0] : 0;
    const bool several = spec_.rank == 3 && view->shape[0] > 1;
    // Matrices lie one behind the other, or each row of one lies between the rows of the others.
    if ((view->shape[outer] > 1 && view->strides[outer] < inner_extent) ||
        (several && batch_stride < matrix &&
         (batch_stride < inner_extent ||
          view->strides[outer] < Reach(*view, 0) + inner_extent))) {
      Refuse(kValueError, name, " has shape ", ShapeText(view->tensor), " and strides ",
             StridesText(*view), ", so that elements share memory; make a copy with .contiguous()");
    }
    const int64_t elements = matrix + (several ? Reach(*view, 0) : 0);
    return Locate(name, elements, element_bytes, several, outer, inner_extent, *view);
  }

  static int64_t Reach(const TensorView& view, int dimension) {
    return (view.shape[dimension] - 1) * view.strides[dimension];
  }

  std::string StridesText(const TensorView& view) const {
    std::string text = "(";
    for (int i = 0; i < spec_.rank; ++i) text += Text(i == 0 ? "" : ", ", view.strides[i]);
    return text + ")";
  }

  void CheckStride(const char* name, int dimension, int64_t step, int64_t inner_extent,
                   TensorView* view) const {
    int64_t& stride = view->strides[dimension];
    if (view->shape[dimension] == 1) {
      stride = inner_extent;  // a multiple of `step`, small, and as in a compact tensor
      return;
    }
    if (stride <= 0 || stride > kMaxExtent || stride % step != 0) {
      Refuse(kValueError, name, " has stride ", stride, " along dimension ", dimension,
             "; must be a multiple of ", step, " elements (", spec_.alignment_bytes,
             " bytes) in 1..", kMaxExtent,
             "; make a copy with .contiguous() or use another kernel");
    }
  }

  MemorySpan Locate(const char* name, int64_t elements, int64_t element_bytes, bool several,
                    int outer, int64_t inner_extent, const TensorView& view) const {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(view.data());
    if (begin == 0 || begin % static_cast<uintptr_t>(spec_.alignment_bytes) != 0) {
      Refuse(kValueError, name, " begins ",
             begin == 0 ? std::string("at a null pointer, as fake and functional tensors do")
                        : Text(begin % static_cast<uintptr_t>(spec_.alignment_bytes),
                               " bytes behind an aligned address"),
             "; must begin at a multiple of ", spec_.alignment_bytes,
             " bytes; make a copy with .clone() or use another kernel");
    }
    uintptr_t bytes = 0;
    uintptr_t end = 0;
    if (__builtin_mul_overflow(elements, element_bytes, &bytes) ||
        __builtin_add_overflow(begin, bytes, &end)) {
      Refuse(kValueError, name, " reaches over ", elements,
             " elements, behind the end of the address space");
    }
    const auto pitch = [&](int dimension) {
      return static_cast<uintptr_t>(view.strides[dimension] * element_bytes);
    };
    return MemorySpan{begin, end, static_cast<uintptr_t>(inner_extent * element_bytes),
                      view.shape[outer] > 1 ? pitch(outer) : 0, several ? pitch(0) : 0};
  }

  void CheckOverlap(const char* name, const MemorySpan& input, const MemorySpan& out) const {
    if (!MayOverlap(input, out)) return;
    const bool out_first = out.begin < input.begin;
    Refuse(kValueError, "out overlaps ", name, ": their memory is ", out.end - out.begin, " and ",
           input.end - input.begin, " bytes long, and out begins ",
           out_first ? input.begin - out.begin : out.begin - input.begin, " bytes ",
           out_first ? "before " : "behind ", "the beginning of ", name,
           "; pass an out with memory of its own");
  }

  const KernelSpec& spec_;
  CheckedCall* const call_;
  const bool quiet_;
  const int rows_;
  const int columns_;
};

}  // namespace

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

void CheckOperands(const KernelSpec& spec, const DLTensor& a, const DLTensor& b,
                   const DLTensor& out, CheckedCall* call) {
  Checker(spec, call, /*quiet=*/false).CheckAll(a, b, out);
}

bool OperandsPass(const KernelSpec& spec, const DLTensor& a, const DLTensor& b,
                  const DLTensor& out, CheckedCall* call) {
  try {
    Checker(spec, call, /*quiet=*/true).CheckAll(a, b, out);
  } catch (const Refused&) {
    return false;
  }
  return true;
}

}  // namespace nvgemm
