#include "torch/torch_ops.h"

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/failure.h"
#include "ffi/ffi_error.h"
#include "core/kernel_table.h"
#include "core/launch.h"
#include "torch/torch_forms.h"
#include "torch/torch_shim.h"
#include "torch/torch_values.h"

namespace nvgemm {
namespace {

namespace shim = torch_shim;

// Makes torch's current stream TVM-FFI's environment stream, which kernels use.
class StreamScope {
 public:
  explicit StreamScope(DLDevice device) : device_(device) {
    if (device.device_type != kDLCUDA) return;
    void* const stream = CurrentCudaStream(device.device_id);
    if (TVMFFIEnvSetStream(kDLCUDA, device.device_id, stream, &previous_) != 0) {
      throw TakeRaisedError("setting the stream of the launch");
    }
  }
  ~StreamScope() {
    if (device_.device_type != kDLCUDA) return;
    TVMFFIEnvSetStream(kDLCUDA, device_.device_id, previous_, nullptr);
  }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  const DLDevice device_;
  TVMFFIStreamHandle previous_ = nullptr;
};

// Stores a thread's last message while torch's exception propagates, because no frame may own it.
// Never freed.
const char* KeepMessage(std::string message) {
  thread_local std::string* const stored = new std::string;
  *stored = std::move(message);
  return stored->c_str();
}

// Runs a body; returns its exception's message, or null.
template <typename Body>
[[gnu::noinline]] const char* MessageOf(const char* op, const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return KeepMessage(Text(op, ": ", error.what()));
  }
}

// Runs a body and, after everything it owned is destroyed, fails like torch's kernels: with a torch
// exception, thrown by torch. This library may have its own statically linked C++ library and
// unwinder, which cannot read the state of torch's. So the frames that the exception crosses, this
// function and its callers, must have nothing to destroy or catch; then the unwinder only steps
// over them. Hence noinline above.
template <typename Body>
void Guarded(const char* op, const Body& body) {
  const char* const message = MessageOf(op, body);
  if (message != nullptr) shim::aoti_torch_check(false, op, __FILE__, __LINE__, message);
}

// An optional tensor argument, with a view of it.
class OptionalTensor {
 public:
  explicit OptionalTensor(OwnedTensor tensor) : tensor_(std::move(tensor)) {
    if (tensor_.get() != nullptr) view_ = ViewOf(tensor_);
  }

  void AddTo(Operands* operands, Role role) const {
    if (tensor_.get() != nullptr) operands->Set(role, view_);
  }

  // Returns the length of a vector, which gives a result extent. Throws Failure for other ranks.
  int64_t LengthOf(const char* what) const {
    if (view_.ndim == 1) return view_.shape[0];
    throw Failure(kValueError,
                  Text(what, " has ", view_.ndim, " dimensions; must have 1"));
  }

 private:
  OwnedTensor tensor_;
  DLTensor view_;  // set only with a tensor
};

OwnedTensor NoTensor() { return OwnedTensor(shim::Tensor{nullptr}); }

// Takes the argument at a stack position, or nothing.
OwnedTensor Take(shim::Value* stack, int at) {
  return at == Form::kNowhere ? NoTensor() : OwnedTensor(stack[at]);
}

// Takes an optional tensor at a stack position: null, or a value on the heap.
OwnedTensor TakeOptional(shim::Value* stack, int at) {
  if (at == Form::kNowhere || stack[at] == 0) return NoTensor();
  const std::unique_ptr<shim::Value> value(reinterpret_cast<shim::Value*>(stack[at]));
  return OwnedTensor(*value);
}

// All arguments for a form, taken from the stack.
template <const Form& kForm>
struct Arguments {
  explicit Arguments(shim::Value* stack)
      : a(stack[kForm.a]),
        b(stack[kForm.b]),
        kernel(stack[kForm.kernel]),
        scale_a(Take(stack, kForm.scale_a)),
        scale_b(Take(stack, kForm.scale_b)),
        offsets(Take(stack, kForm.offsets)),
        rows(Take(stack, kForm.rows)),
        addend(kForm.addend == Form::kNowhere ? TakeOptional(stack, kForm.optional_addend)
                                              : Take(stack, kForm.addend)),
        out(Take(stack, kForm.out)) {}

  void AddExtras(Operands* operands) const {
    scale_a.AddTo(operands, Role::kScaleA);
    scale_b.AddTo(operands, Role::kScaleB);
    offsets.AddTo(operands, Role::kOffsets);
    rows.AddTo(operands, Role::kRows);
    addend.AddTo(operands, Role::kAddend);
  }

  Kernel* FindKernel() const {
    Kernel* result = FindOrLoadKernel(ViewOf(kernel));
    if (result->spec.op != kForm.op) {
      throw Failure(kValueError, Text("kernel ", ShortId(result->spec.id), " is for ",
                                      OpName(result->spec.op), ", not for ", OpName(kForm.op)));
    }
    if (result->spec.form != kForm.form) {
      throw Failure(kValueError, Text("kernel ", ShortId(result->spec.id), WrongFormText(result->spec)));
    }
    if (result->spec.op == Op::kGroupedMm && result->spec.addend == AddendKind::kMatrix) {
      throw Failure(kValueError, Text("kernel ", ShortId(result->spec.id),
                                      " adds a matrix to groups, which no operator supports: call "
                                      "nvgemm_runtime.grouped_mm"));
    }
    return result;
  }

  static std::string WrongFormText(const KernelSpec& spec) {
    const std::string function = Text(": call nvgemm_runtime.", OpName(spec.op));
    switch (spec.form) {
      case GateForm::kNone:
        return " has no gated epilogue";
      case GateForm::kJoined:
        return kForm.op == Op::kGroupedMm ? " has a gated epilogue: call grouped_gated_mm"
               : kForm.op == Op::kGatheredGroupedMm
                   ? " has a gated epilogue: call gathered_grouped_gated_mm"
                   : " has a gated epilogue: call gated_mm";
      case GateForm::kKept:
        return " keeps its product, which no operator supports" + function;
      case GateForm::kGradient:
      case GateForm::kGradientSums:
        return " computes a gate's gradient, which no operator supports" + function;
      case GateForm::kUps:
        return " reads gates, which no operator supports" + function;
    }
    return "";  // unreachable: all forms are above
  }

  // Returns the result extent that a and b do not have: groups along k, or gathered rows.
  int64_t count() const {
    if (kForm.op == Op::kGatheredGroupedMm) return rows.LengthOf(RoleName(Role::kRows));
    return kForm.op == Op::kKGroupedMm ? offsets.LengthOf(RoleName(Role::kOffsets)) : 0;
  }

  const OwnedTensor a;
  const OwnedTensor b;
  const OwnedString kernel;
  const OptionalTensor scale_a;
  const OptionalTensor scale_b;
  const OptionalTensor offsets;
  const OptionalTensor rows;
  const OptionalTensor addend;
  const OwnedTensor out;
};

template <const Form& kForm>
void Functional(shim::Value* stack, uint64_t, uint64_t) {
  Guarded(kForm.name, [stack] {
    const Arguments<kForm> arguments(stack);
    Kernel* kernel = arguments.FindKernel();
    const DLTensor a = ViewOf(arguments.a);
    const DLTensor b = ViewOf(arguments.b);
    OwnedTensor out = AllocateResult(kernel->spec, a, b, arguments.count());
    const DLTensor out_view = ViewOf(out);
    const StreamScope scope(a.device);
    Operands operands(a, b, out_view);
    arguments.AddExtras(&operands);
    Launch(kernel, operands);
    stack[0] = out.Release();
  });
}

template <const Form& kForm>
void Out(shim::Value* stack, uint64_t, uint64_t) {
  Guarded(kForm.name, [stack] {
    const Arguments<kForm> arguments(stack);
    const DLTensor a = ViewOf(arguments.a);
    const StreamScope scope(a.device);
    Kernel* kernel = arguments.FindKernel();
    MarkWritten(arguments.out);  // first, because torch may refuse it
    const DLTensor b = ViewOf(arguments.b);
    const DLTensor out = ViewOf(arguments.out);
    Operands operands(a, b, out);
    arguments.AddExtras(&operands);
    Launch(kernel, operands);
  });
}

constexpr int64_t kMissing = -1;

// Returns the handle for the kernel that compiled code names, or kMissing.
void Prepare(shim::Value* stack, uint64_t, uint64_t) {
  Guarded("nvgemm_aot::prepare", [stack] {
    const OwnedString id(stack[0]);
    const OwnedString origin(stack[1]);
    const Kernel* kernel = FindOrPrepareKernel(ViewOf(id), ViewOf(origin));
    stack[0] = static_cast<shim::Value>(kernel == nullptr ? kMissing : kernel->handle);
  });
}

// Launches a kernel by handle; returns false, with nothing done, if it cannot serve. Raises no
// error then: in a Python dispatch mode, such as torch's at a graph's first call, an error would
// stay set in Python although generated C++ continues.
void TryGemm(shim::Value* stack, uint64_t, uint64_t) {
  Guarded("nvgemm_aot::try_gemm", [stack] {
    const OwnedTensor a(stack[0]);
    const OwnedTensor b(stack[1]);
    const OwnedTensor out(stack[3]);
    const OptionalTensor scale_a(TakeOptional(stack, 4));
    const OptionalTensor scale_b(TakeOptional(stack, 5));
    const OptionalTensor offsets(TakeOptional(stack, 6));
    const OptionalTensor addend(TakeOptional(stack, 7));
    Kernel* kernel = KernelOfHandle(static_cast<int64_t>(stack[2]));
    const DLTensor a_view = ViewOf(a);
    const DLTensor b_view = ViewOf(b);
    const DLTensor out_view = ViewOf(out);
    const StreamScope scope(a_view.device);
    Operands operands(a_view, b_view, out_view);
    scale_a.AddTo(&operands, Role::kScaleA);
    scale_b.AddTo(&operands, Role::kScaleB);
    offsets.AddTo(&operands, Role::kOffsets);
    addend.AddTo(&operands, Role::kAddend);
    stack[0] = TryServe(kernel, operands);
  });
}

void Abi(shim::Value* stack, uint64_t, uint64_t) { stack[0] = static_cast<shim::Value>(kAbi); }

constexpr char kNamespace[] = "nvgemm_aot";

// The out forms return nothing: torch cannot functionalize a custom operator that returns an alias
// of an argument, so torch.compile would refuse it.
constexpr const char* kSchemas[] = {
    "mm(Tensor a, Tensor b, str kernel) -> Tensor",
    "mm.out(Tensor a, Tensor b, str kernel, *, Tensor(a!) out) -> ()",
    "bmm(Tensor a, Tensor b, str kernel) -> Tensor",
    "bmm.out(Tensor a, Tensor b, str kernel, *, Tensor(a!) out) -> ()",
    "addmm(Tensor input, Tensor a, Tensor b, str kernel) -> Tensor",
    "addmm.out(Tensor input, Tensor a, Tensor b, str kernel, *, Tensor(a!) out) -> ()",
    "baddbmm(Tensor input, Tensor a, Tensor b, str kernel) -> Tensor",
    "baddbmm.out(Tensor input, Tensor a, Tensor b, str kernel, *, Tensor(a!) out) -> ()",
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str kernel, *, "
    "Tensor? bias=None) -> Tensor",
    "scaled_mm.out(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str kernel, *, "
    "Tensor? bias=None, Tensor(a!) out) -> ()",
    "grouped_mm(Tensor a, Tensor b, Tensor offsets, str kernel, *, Tensor? bias=None) -> Tensor",
    "grouped_mm.out(Tensor a, Tensor b, Tensor offsets, str kernel, *, Tensor? bias=None, "
    "Tensor(a!) out) -> ()",
    "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offsets, "
    "str kernel) -> Tensor",
    "scaled_grouped_mm.out(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offsets, "
    "str kernel, *, Tensor(a!) out) -> ()",
    "k_grouped_mm(Tensor a, Tensor b, Tensor offsets, str kernel) -> Tensor",
    "k_grouped_mm.out(Tensor a, Tensor b, Tensor offsets, str kernel, *, Tensor(a!) out) -> ()",
    "gathered_mm(Tensor a, Tensor b, Tensor rows, str kernel) -> Tensor",
    "gathered_mm.out(Tensor a, Tensor b, Tensor rows, str kernel, *, Tensor(a!) out) -> ()",
    "gated_mm(Tensor a, Tensor b, str kernel, *, Tensor? bias=None) -> Tensor",
    "gated_mm.out(Tensor a, Tensor b, str kernel, *, Tensor? bias=None, Tensor(a!) out) -> ()",
    "grouped_gated_mm(Tensor a, Tensor b, Tensor offsets, str kernel, *, Tensor? bias=None) "
    "-> Tensor",
    "grouped_gated_mm.out(Tensor a, Tensor b, Tensor offsets, str kernel, *, Tensor? bias=None, "
    "Tensor(a!) out) -> ()",
    "gathered_grouped_mm(Tensor a, Tensor b, Tensor offsets, Tensor rows, str kernel, *, "
    "Tensor? bias=None) -> Tensor",
    "gathered_grouped_mm.out(Tensor a, Tensor b, Tensor offsets, Tensor rows, str kernel, *, "
    "Tensor? bias=None, Tensor(a!) out) -> ()",
    "gathered_grouped_gated_mm(Tensor a, Tensor b, Tensor offsets, Tensor rows, str kernel, *, "
    "Tensor? bias=None) -> Tensor",
    "gathered_grouped_gated_mm.out(Tensor a, Tensor b, Tensor offsets, Tensor rows, str kernel, *, "
    "Tensor? bias=None, Tensor(a!) out) -> ()",
    "prepare(str kernel, str origin) -> int",
    "try_gemm(Tensor a, Tensor b, int kernel, *, Tensor(a!) out, Tensor? scale_a=None, "
    "Tensor? scale_b=None, Tensor? offsets=None, Tensor? addend=None) -> bool",
    "abi() -> int",
};

struct Implementation {
  const char* name;
  shim::BoxedKernel kernel;
};

constexpr Implementation kDeviceImplementations[] = {
    {"mm", Functional<kMm>},
    {"mm.out", Out<kMmOut>},
    {"bmm", Functional<kBmm>},
    {"bmm.out", Out<kBmmOut>},
    {"addmm", Functional<kAddmm>},
    {"addmm.out", Out<kAddmmOut>},
    {"baddbmm", Functional<kBaddbmm>},
    {"baddbmm.out", Out<kBaddbmmOut>},
    {"scaled_mm", Functional<kScaledMm>},
    {"scaled_mm.out", Out<kScaledMmOut>},
    {"grouped_mm", Functional<kGroupedMm>},
    {"grouped_mm.out", Out<kGroupedMmOut>},
    {"scaled_grouped_mm", Functional<kScaledGroupedMm>},
    {"scaled_grouped_mm.out", Out<kScaledGroupedMmOut>},
    {"k_grouped_mm", Functional<kKGroupedMm>},
    {"k_grouped_mm.out", Out<kKGroupedMmOut>},
    {"gathered_mm", Functional<kGatheredMm>},
    {"gathered_mm.out", Out<kGatheredMmOut>},
    {"gated_mm", Functional<kGatedMm>},
    {"gated_mm.out", Out<kGatedMmOut>},
    {"grouped_gated_mm", Functional<kGroupedGatedMm>},
    {"grouped_gated_mm.out", Out<kGroupedGatedMmOut>},
    {"gathered_grouped_mm", Functional<kGatheredGroupedMm>},
    {"gathered_grouped_mm.out", Out<kGatheredGroupedMmOut>},
    {"gathered_grouped_gated_mm", Functional<kGatheredGroupedGatedMm>},
    {"gathered_grouped_gated_mm.out", Out<kGatheredGroupedGatedMmOut>},
    {"try_gemm", TryGemm},
};

// Without tensors there is no device to dispatch on.
constexpr Implementation kOtherImplementations[] = {{"prepare", Prepare}, {"abi", Abi}};

void Implement(shim::Library library, const Implementation& implementation) {
  Check(shim::torch_library_impl(library, implementation.name, implementation.kernel,
                                 shim::kBuildVersion),
        "torch_library_impl");
}

// Library objects are never deleted: that would remove the operators while torch may hold them.
shim::Library ImplementationLibrary(const char* dispatch_key) {
  shim::Library library = nullptr;
  Check(shim::aoti_torch_library_init_impl(kNamespace, dispatch_key, __FILE__, __LINE__, &library),
        "aoti_torch_library_init_impl");
  return library;
}

std::atomic<int64_t> registered_abi{0};

void Register() {
  shim::Library definitions = nullptr;
  Check(shim::aoti_torch_library_init_fragment(kNamespace, __FILE__, __LINE__, &definitions),
        "aoti_torch_library_init_fragment");
  for (const char* schema : kSchemas) {
    Check(shim::aoti_torch_library_def(definitions, schema), "aoti_torch_library_def");
  }
  for (const char* key : {"CPU", "CUDA"}) {
    const shim::Library library = ImplementationLibrary(key);
    for (const Implementation& implementation : kDeviceImplementations) {
      Implement(library, implementation);
    }
  }
  const shim::Library library = ImplementationLibrary("CompositeExplicitAutograd");
  for (const Implementation& implementation : kOtherImplementations) {
    Implement(library, implementation);
  }
}

}  // namespace

void RegisterTorchOps() {
  static const bool registered = [] {
    Register();
    registered_abi.store(kCalledAbi, std::memory_order_release);
    return true;
  }();
  static_cast<void>(registered);
}

int64_t RegisteredAbi() { return registered_abi.load(std::memory_order_acquire); }

}  // namespace nvgemm
