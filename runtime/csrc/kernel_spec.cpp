// Checks that a kernel's parameters are those that its GEMM needs.

#include "failure.h"
#include "kernel_table.h"

namespace nvgemm {
namespace {

using Kind = Parameter::Kind;

int CountOf(const KernelSpec& spec, Kind kind) {
  int count = 0;
  for (const Parameter& parameter : spec.parameters) count += parameter.kind == kind;
  return count;
}

int CountOf(const KernelSpec& spec, Role role) {
  int count = 0;
  for (const Parameter& parameter : spec.parameters) {
    const bool is_tensor = parameter.kind == Kind::kTensor || parameter.kind == Kind::kPointer;
    count += is_tensor && parameter.role == role;
  }
  return count;
}

void CheckCount(const KernelSpec& spec, const char* name, int count, int wanted) {
  if (count == wanted) return;
  throw Failure(kValueError, Text("register_kernel: kernel ", ShortId(spec.id), " (",
                                  OpName(spec.op), ") is passed ", name, " ", count,
                                  " times; must be ", wanted));
}

bool IsPlain(const std::vector<Parameter>& parameters) {
  constexpr Role kOperands[] = {Role::kA, Role::kB, Role::kOut};
  if (parameters.size() != 4 || parameters[3].kind != Kind::kStream) return false;
  for (size_t i = 0; i < 3; ++i) {
    if (parameters[i].kind != Kind::kTensor || parameters[i].role != kOperands[i]) return false;
  }
  return true;
}

}  // namespace

void KernelSpec::Complete() {
  extras = 0;
  if (scales != ScaleKind::kNone) extras |= SetOf({Role::kScaleA, Role::kScaleB});
  if (op == Op::kGroupedMm) extras |= SetOf(Role::kOffsets);
  if (addend != AddendKind::kNone) extras |= SetOf(Role::kAddend);
  const Roles taken = extras | SetOf({Role::kA, Role::kB, Role::kOut});
  for (int i = 0; i < kRoles; ++i) {
    const Role role = static_cast<Role>(i);
    CheckCount(*this, RoleName(role), CountOf(*this, role), (taken & SetOf(role)) != 0);
  }
  needs_compact = CountOf(*this, Kind::kPointer) != 0;
  CheckCount(*this, "mnkl", CountOf(*this, Kind::kMnkl), needs_compact);
  CheckCount(*this, "workspace", CountOf(*this, Kind::kWorkspace), workspace_bytes > 0);
  CheckCount(*this, "stream", CountOf(*this, Kind::kStream), 1);
  is_plain = IsPlain(parameters);
}

}  // namespace nvgemm
