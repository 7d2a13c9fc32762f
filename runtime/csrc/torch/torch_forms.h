// Operators that compute a GEMM, with their argument positions.

#ifndef NVGEMM_RUNTIME_CSRC_TORCH_FORMS_H_
#define NVGEMM_RUNTIME_CSRC_TORCH_FORMS_H_

#include "core/gemm.h"

namespace nvgemm {

// An operator that computes a GEMM: its name and its argument positions on the stack, kNowhere for
// missing ones. Only the out form has `out`.
struct Form {
  const char* name;
  Op op;
  int a;
  int b;
  int kernel;
  int scale_a = kNowhere;
  int scale_b = kNowhere;
  int offsets = kNowhere;
  int rows = kNowhere;
  int addend = kNowhere;
  int optional_addend = kNowhere;
  int out = kNowhere;
  GateForm form = GateForm::kNone;

  static constexpr int kNowhere = -1;
};

inline constexpr Form kMm{"nvgemm_aot::mm", Op::kMm, 0, 1, 2};
inline constexpr Form kBmm{"nvgemm_aot::bmm", Op::kBmm, 0, 1, 2};
constexpr Form Adding(const char* name, Op op) {
  Form form{name, op, 1, 2, 3};
  form.addend = 0;
  return form;
}
inline constexpr Form kAddmm = Adding("nvgemm_aot::addmm", Op::kMm);
inline constexpr Form kBaddbmm = Adding("nvgemm_aot::baddbmm", Op::kBmm);
constexpr Form Scaled() {
  Form form{"nvgemm_aot::scaled_mm", Op::kMm, 0, 1, 4};
  form.scale_a = 2;
  form.scale_b = 3;
  form.optional_addend = 5;
  return form;
}
inline constexpr Form kScaledMm = Scaled();
constexpr Form Grouped(const char* name, Op op) {
  Form form{name, op, 0, 1, 3};
  form.offsets = 2;
  form.optional_addend = 4;
  return form;
}
inline constexpr Form kGroupedMm = Grouped("nvgemm_aot::grouped_mm", Op::kGroupedMm);
constexpr Form ScaledGrouped() {
  Form form{"nvgemm_aot::scaled_grouped_mm", Op::kGroupedMm, 0, 1, 5};
  form.scale_a = 2;
  form.scale_b = 3;
  form.offsets = 4;
  return form;
}
inline constexpr Form kScaledGroupedMm = ScaledGrouped();
constexpr Form GroupedGated() {
  Form form = Grouped("nvgemm_aot::grouped_gated_mm", Op::kGroupedMm);
  form.form = GateForm::kJoined;
  return form;
}
inline constexpr Form kGroupedGatedMm = GroupedGated();
constexpr Form GatheredGrouped(const char* name, GateForm gate) {
  Form form{name, Op::kGatheredGroupedMm, 0, 1, 4};
  form.offsets = 2;
  form.rows = 3;
  form.optional_addend = 5;
  form.form = gate;
  return form;
}
inline constexpr Form kGatheredGroupedMm =
    GatheredGrouped("nvgemm_aot::gathered_grouped_mm", GateForm::kNone);
inline constexpr Form kGatheredGroupedGatedMm =
    GatheredGrouped("nvgemm_aot::gathered_grouped_gated_mm", GateForm::kJoined);
constexpr Form KGrouped() {
  Form form = Grouped("nvgemm_aot::k_grouped_mm", Op::kKGroupedMm);
  form.optional_addend = Form::kNowhere;
  return form;
}
inline constexpr Form kKGroupedMm = KGrouped();

constexpr Form Gathered() {
  Form form{"nvgemm_aot::gathered_mm", Op::kGatheredMm, 0, 1, 3};
  form.rows = 2;
  return form;
}
inline constexpr Form kGatheredMm = Gathered();

constexpr Form Gated() {
  Form form{"nvgemm_aot::gated_mm", Op::kMm, 0, 1, 2};
  form.optional_addend = 3;
  form.form = GateForm::kJoined;
  return form;
}
inline constexpr Form kGatedMm = Gated();

constexpr Form WithOut(Form form, const char* name, int out) {
  form.name = name;
  form.out = out;
  return form;
}
inline constexpr Form kMmOut = WithOut(kMm, "nvgemm_aot::mm.out", 3);
inline constexpr Form kBmmOut = WithOut(kBmm, "nvgemm_aot::bmm.out", 3);
inline constexpr Form kAddmmOut = WithOut(kAddmm, "nvgemm_aot::addmm.out", 4);
inline constexpr Form kBaddbmmOut = WithOut(kBaddbmm, "nvgemm_aot::baddbmm.out", 4);
inline constexpr Form kScaledMmOut = WithOut(kScaledMm, "nvgemm_aot::scaled_mm.out", 6);
inline constexpr Form kGroupedMmOut = WithOut(kGroupedMm, "nvgemm_aot::grouped_mm.out", 5);
inline constexpr Form kScaledGroupedMmOut =
    WithOut(kScaledGroupedMm, "nvgemm_aot::scaled_grouped_mm.out", 6);
inline constexpr Form kGroupedGatedMmOut =
    WithOut(kGroupedGatedMm, "nvgemm_aot::grouped_gated_mm.out", 5);
inline constexpr Form kGatheredGroupedMmOut =
    WithOut(kGatheredGroupedMm, "nvgemm_aot::gathered_grouped_mm.out", 6);
inline constexpr Form kGatheredGroupedGatedMmOut =
    WithOut(kGatheredGroupedGatedMm, "nvgemm_aot::gathered_grouped_gated_mm.out", 6);
inline constexpr Form kKGroupedMmOut = WithOut(kKGroupedMm, "nvgemm_aot::k_grouped_mm.out", 4);
inline constexpr Form kGatheredMmOut = WithOut(kGatheredMm, "nvgemm_aot::gathered_mm.out", 4);
inline constexpr Form kGatedMmOut = WithOut(kGatedMm, "nvgemm_aot::gated_mm.out", 4);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_TORCH_FORMS_H_
