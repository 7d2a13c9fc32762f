// Describes a kernel's GEMM: operation, tensors, and how the kernel is called.

#ifndef NVGEMM_RUNTIME_CSRC_GEMM_H_
#define NVGEMM_RUNTIME_CSRC_GEMM_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <initializer_list>

namespace nvgemm {

enum class Op { kMm, kBmm, kGroupedMm, kKGroupedMm, kGatheredMm, kGatheredGroupedMm };

constexpr const char* OpName(Op op) {
  return op == Op::kMm           ? "mm"
         : op == Op::kBmm        ? "bmm"
         : op == Op::kGroupedMm  ? "grouped_mm"
         : op == Op::kKGroupedMm ? "k_grouped_mm"
         : op == Op::kGatheredMm ? "gathered_mm"
                                 : "gathered_grouped_mm";
}

// Whether groups are of rows, along m, with a b for each.
constexpr bool GroupsRows(Op op) { return op == Op::kGroupedMm || op == Op::kGatheredGroupedMm; }

// Whether rows are named: of b for each element of a, or of a for each row of out.
constexpr bool IsGathered(Op op) { return op == Op::kGatheredMm || op == Op::kGatheredGroupedMm; }

// Whether offsets say where groups end: along m, or along k.
constexpr bool HasGroups(Op op) { return GroupsRows(op) || op == Op::kKGroupedMm; }

// The tensors of a launch. Those between b and out are the extras, in the order in which every
// function takes them.
enum class Role { kA, kB, kScaleA, kScaleB, kOffsets, kRows, kAddend, kSums, kOut };
inline constexpr int kRoles = 9;

inline constexpr Role kExtras[] = {Role::kScaleA, Role::kScaleB, Role::kOffsets, Role::kRows,
                                   Role::kAddend, Role::kSums};

constexpr const char* RoleName(Role role) {
  constexpr const char* kNames[kRoles] = {"a",    "b",      "scale_a", "scale_b", "offsets",
                                          "rows", "addend", "sums",    "out"};
  return kNames[static_cast<int>(role)];
}

// A set of roles, as bits.
using Roles = uint32_t;
constexpr Roles SetOf(Role role) { return Roles{1} << static_cast<int>(role); }
constexpr Roles SetOf(std::initializer_list<Role> roles) {
  Roles set = 0;
  for (const Role role : roles) set |= SetOf(role);
  return set;
}

// One value for a whole operand, for a row of a (column of b), or for a block along k.
enum class ScaleKind { kNone, kTensor, kRow, kBlock };

// A vector that is added to every row of the result, a tensor of the result's shape, or gates that
// are read, of the product's shape.
enum class AddendKind { kNone, kRow, kMatrix, kGates };

// What a gated epilogue stores: for each pair of columns of the product what the gate gives, that
// behind the product, for each column the gradients of a pair, the same with sums of rows beside
// it, or the product behind which stands what gates that are read make of it.
enum class GateForm { kNone, kJoined, kKept, kGradient, kGradientSums, kUps };

// Whether an epilogue reads what lies in the addend's place, and adds nothing.
constexpr bool ReadsAddend(GateForm form) {
  return form == GateForm::kGradient || form == GateForm::kGradientSums || form == GateForm::kUps;
}

// Columns of the product for one part of a row's sums; as roles.SUMMED_COLUMNS.
inline constexpr int64_t kSummedColumns = 64;

// A result has `out` columns for `product` columns of the product.
struct ColumnRatio {
  int64_t product;
  int64_t out;
};

constexpr ColumnRatio RatioOf(GateForm form) {
  constexpr ColumnRatio kRatios[] = {{1, 1}, {2, 1}, {2, 3}, {1, 2}, {1, 2}, {1, 2}};
  return kRatios[static_cast<int>(form)];
}

// One parameter of a kernel's function.
struct Parameter {
  enum class Kind {
    kTensor,     // of `role`
    kPointer,    // to the first element of the tensor of `role`, which is compact
    kMnkl,       // the array (m, n, k, batch)
    kWorkspace,  // a tensor of bytes
    kClusters,   // how many clusters of the kernel's size the device runs at once
    kStream,     // the CUDA stream
  };
  Kind kind;
  Role role;  // of a tensor or pointer
};

inline constexpr int kMaxParameters = kRoles + 4;

// Bytes of an element, which may hold several values.
constexpr int64_t ElementBytes(DLDataType dtype) { return int64_t{dtype.bits} * dtype.lanes / 8; }

constexpr bool SameDType(DLDataType x, DLDataType y) {
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_GEMM_H_
