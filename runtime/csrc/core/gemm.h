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

// Returns true if groups are rows along m, with one b per group.
constexpr bool GroupsRows(Op op) { return op == Op::kGroupedMm || op == Op::kGatheredGroupedMm; }

// Returns true if indices select rows: in b per element of a, or in a per row of out.
constexpr bool IsGathered(Op op) { return op == Op::kGatheredMm || op == Op::kGatheredGroupedMm; }

// Returns true if offsets end groups along m or k.
constexpr bool HasGroups(Op op) { return GroupsRows(op) || op == Op::kKGroupedMm; }

// Tensors in a launch. Those between b and out are the extras, in the order used everywhere.
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

// One scale for an operand, per row of a (column of b), or per block along k.
enum class ScaleKind { kNone, kTensor, kRow, kBlock };

// A vector added to every result row, a tensor in the result's shape, or gates in the product's
// shape, which are read.
enum class AddendKind { kNone, kRow, kMatrix, kGates };

// Layout that a gated epilogue stores; see GateForm in nvgemm_runtime/gemm/epilogues.py.
enum class GateForm { kNone, kJoined, kKept, kGradient, kGradientSums, kUps };

// Returns true if an epilogue reads the addend operand instead of adding it.
constexpr bool ReadsAddend(GateForm form) {
  return form == GateForm::kGradient || form == GateForm::kGradientSums || form == GateForm::kUps;
}

// Product columns per row-sum part; equals roles.SUMMED_COLUMNS.
inline constexpr int64_t kSummedColumns = 64;

// A result has `out` columns per `product` columns in the product.
struct ColumnRatio {
  int64_t product;
  int64_t out;
};

constexpr ColumnRatio RatioOf(GateForm form) {
  constexpr ColumnRatio kRatios[] = {{1, 1}, {2, 1}, {2, 3}, {1, 2}, {1, 2}, {1, 2}};
  return kRatios[static_cast<int>(form)];
}

// One parameter in a kernel's function.
struct Parameter {
  enum class Kind {
    kTensor,     // tensor for `role`
    kPointer,    // address of the first element of the compact tensor for `role`
    kMnkl,       // array (m, n, k, batch)
    kWorkspace,  // byte tensor
    kClusters,   // clusters that the device runs at once, in the kernel's cluster size
    kStream,     // CUDA stream
  };
  Kind kind;
  Role role;  // for kTensor and kPointer
};

inline constexpr int kMaxParameters = kRoles + 4;

// Returns the bytes per element, which may hold several values.
constexpr int64_t ElementBytes(DLDataType dtype) { return int64_t{dtype.bits} * dtype.lanes / 8; }

constexpr bool SameDType(DLDataType x, DLDataType y) {
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_GEMM_H_
