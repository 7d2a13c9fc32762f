#include "core/kernel_table.h"

#include <pthread.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/append_only.h"
#include "core/failure.h"
#include "ffi/ffi_error.h"

namespace nvgemm {
namespace {

using Slot = std::atomic<Kernel*>;

// Open addressing, at most half full. When full, an index twice as large replaces it; the old one
// stays for readers that still hold it. All old ones together take at most as much memory as the
// newest.
struct Index {
  explicit Index(size_t capacity_in)
      : capacity(capacity_in), slots(new Slot[capacity_in]()) {}

  const size_t capacity;  // a power of two
  const std::unique_ptr<Slot[]> slots;

  Kernel* Find(std::string_view id) const {
    for (size_t at = std::hash<std::string_view>()(id);; ++at) {
      Kernel* kernel = slots[at & (capacity - 1)].load(std::memory_order_acquire);
      if (kernel == nullptr || kernel->spec.id == id) return kernel;
    }
  }

  void Insert(Kernel* kernel) {
    size_t at = std::hash<std::string_view>()(kernel->spec.id);
    while (slots[at & (capacity - 1)].load(std::memory_order_relaxed) != nullptr) ++at;
    slots[at & (capacity - 1)].store(kernel, std::memory_order_release);
  }
};

class Table {
 public:
  Table() : index_(new Index(1024)) {
    // A thread that the forked child does not have may hold a mutex.
    pthread_atfork(nullptr, nullptr, [] { Instance()->ResetLocks(); });
  }

  // Never destroyed: torch or Python may launch while the process exits.
  static Table* Instance() {
    static Table* const table = new Table();
    return table;
  }

  Kernel* Find(std::string_view id) const {
    return index_.load(std::memory_order_acquire)->Find(id);
  }

  Kernel* At(int64_t handle) const { return kernels_.At(handle); }

  Kernel* Add(KernelSpec spec) {
    const std::lock_guard<std::mutex> lock(writing_);
    if (Kernel* existing = Find(spec.id)) return existing;
    const int64_t handle = kernels_.size();
    if (handle == kernels_.kMaxSize) {
      throw Failure(kRuntimeError, Text("cannot register kernel ", ShortId(spec.id), ": ", handle,
                                        " kernels are registered, the most a process can have"));
    }
    auto kernel = std::make_unique<Kernel>(std::move(spec));
    kernel->handle = handle;
    GrowIndex(handle + 1);
    // In this order, a child forked in between either sees the complete kernel or can add it again.
    Kernel* added = kernel.release();
    kernels_.Append(added);
    index_.load(std::memory_order_relaxed)->Insert(added);
    return added;
  }

 private:
  void GrowIndex(int64_t count) {
    const Index* old = index_.load(std::memory_order_relaxed);
    if (static_cast<size_t>(count) * 2 <= old->capacity) return;
    auto grown = std::make_unique<Index>(old->capacity * 2);
    for (int64_t handle = 0; handle < kernels_.size(); ++handle) grown->Insert(At(handle));
    index_.store(grown.release(), std::memory_order_release);
  }

  void ResetLocks() {
    new (&writing_) std::mutex();
    for (int64_t handle = 0; Kernel* kernel = At(handle); ++handle) {
      new (&kernel->first_use) std::mutex();
    }
  }

  std::mutex writing_;  // held while adding
  std::atomic<Index*> index_;
  AppendOnly<Kernel> kernels_;  // by handle
};

std::atomic<TVMFFIObjectHandle> loader{nullptr};
std::atomic<TVMFFIObjectHandle> reporter{nullptr};

// Calls a function with texts; the first is a kernel id.
void CallWithTexts(TVMFFIObjectHandle function, std::initializer_list<std::string_view> texts) {
  std::vector<std::string> owned(texts.begin(), texts.end());
  std::vector<TVMFFIAny> arguments(owned.size());
  for (size_t i = 0; i < owned.size(); ++i) {
    arguments[i] = TVMFFIAny{};
    arguments[i].type_index = kTVMFFIRawStr;
    arguments[i].v_c_str = owned[i].c_str();
  }
  TVMFFIAny result{};
  result.type_index = kTVMFFINone;
  if (TVMFFIFunctionCall(function, arguments.data(), static_cast<int32_t>(arguments.size()),
                         &result) != 0) {
    throw TakeRaisedError(Text("kernel ", ShortId(owned.front())));
  }
  ReleaseResult(result);
}

bool IsPlain(const std::vector<Parameter>& parameters) {
  using Kind = Parameter::Kind;
  constexpr Role kOperands[] = {Role::kA, Role::kB, Role::kOut};
  if (parameters.size() != 4 || parameters[3].kind != Kind::kStream) return false;
  for (size_t i = 0; i < 3; ++i) {
    if (parameters[i].kind != Kind::kTensor || parameters[i].role != kOperands[i]) return false;
  }
  return true;
}

}  // namespace

void KernelSpec::Complete() {
  if (scales != ScaleKind::kNone) extras |= SetOf({Role::kScaleA, Role::kScaleB});
  if (HasGroups(op)) extras |= SetOf(Role::kOffsets);
  if (IsGathered(op)) extras |= SetOf(Role::kRows);
  if (addend != AddendKind::kNone) extras |= SetOf(Role::kAddend);
  if (form == GateForm::kGradientSums) extras |= SetOf(Role::kSums);
  for (const Parameter& parameter : parameters) {
    needs_compact |= parameter.kind == Parameter::Kind::kPointer;
  }
  is_plain = IsPlain(parameters);
}

Kernel* RegisterKernel(KernelSpec spec) { return Table::Instance()->Add(std::move(spec)); }

Kernel* FindKernel(std::string_view id) { return Table::Instance()->Find(id); }

Kernel* KernelOfHandle(int64_t handle) {
  Kernel* kernel = Table::Instance()->At(handle);
  if (kernel == nullptr) {
    throw Failure(kNoKernelError, Text("no kernel has the handle ", handle,
                                       "; use one that register_kernel returned in this process"));
  }
  return kernel;
}

Kernel* FindOrLoadKernel(std::string_view id) {
  if (Kernel* kernel = FindKernel(id)) return kernel;
  TVMFFIObjectHandle function = loader.load(std::memory_order_acquire);
  if (function != nullptr) CallWithTexts(function, {id});
  if (Kernel* kernel = FindKernel(id)) return kernel;
  throw Failure(
      kNoKernelError,
      Text("no kernel ", ShortId(id), " is loaded",
           function == nullptr ? ", and no loader is set; register it first"
                               : "; no installed bundle has it: install the wheel that does"));
}

Kernel* FindOrPrepareKernel(std::string_view id, std::string_view origin) {
  // Also for a registered kernel: it may be new to the device, and preload() must learn about it.
  TVMFFIObjectHandle function = loader.load(std::memory_order_acquire);
  if (function != nullptr) CallWithTexts(function, {id, origin});
  return FindKernel(id);
}

void SetLoader(TVMFFIObjectHandle function) {
  loader.store(function, std::memory_order_release);
}

void ReportFailure(const Kernel& kernel, const Failure& failure) {
  TVMFFIObjectHandle function = reporter.load(std::memory_order_acquire);
  if (function == nullptr) return;
  try {
    CallWithTexts(function, {kernel.spec.id, failure.kind(), failure.what()});
  } catch (const Failure&) {
    // The GEMM runs on ATen even if the report fails.
  }
}

void SetReporter(TVMFFIObjectHandle function) {
  reporter.store(function, std::memory_order_release);
}

}  // namespace nvgemm
