#include "core/dispatch_table.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "core/append_only.h"
#include "core/failure.h"

namespace nvgemm {
namespace {

// Marks a slot where nothing is set yet. Only its address matters.
Kernel* Unset() {
  static char unset;
  return reinterpret_cast<Kernel*>(&unset);
}

class Tables {
 public:
  Tables() {
    // A thread that the forked child does not have may hold the mutex.
    pthread_atfork(nullptr, nullptr, [] { new (&Instance()->writing_) std::mutex(); });
  }

  // Never destroyed: torch or Python may launch while the process exits.
  static Tables* Instance() {
    static Tables* const tables = new Tables();
    return tables;
  }

  DispatchTable* At(int64_t handle) const { return tables_.At(handle); }

  int64_t Add(std::unique_ptr<DispatchTable> table) {
    const std::lock_guard<std::mutex> lock(writing_);
    const int64_t handle = tables_.size();
    if (handle == tables_.kMaxSize) {
      throw Failure(kRuntimeError, Text("cannot register a dispatch table: ", handle,
                                        " are registered, the most a process can have"));
    }
    tables_.Append(table.release());
    return handle;
  }

 private:
  std::mutex writing_;  // held while adding
  AppendOnly<DispatchTable> tables_;
};

}  // namespace

DispatchTable::DispatchTable(int64_t slot_count, std::vector<int64_t> bounds,
                             std::vector<int64_t> segments)
    : bounds_(std::move(bounds)),
      segments_(std::move(segments)),
      slot_count_(slot_count),
      kernels_(new std::atomic<Kernel*>[static_cast<size_t>(std::max<int64_t>(slot_count, 0))]) {
  for (int64_t slot = 0; slot < slot_count_; ++slot) {
    kernels_[static_cast<size_t>(slot)].store(Unset(), std::memory_order_relaxed);
  }
  if (segments_.size() != bounds_.size() + 1) {
    throw Failure(kValueError, Text("a dispatch table has ", segments_.size(), " segments and ",
                                    bounds_.size(), " bounds; must have one more segment than bounds"));
  }
  for (size_t i = 1; i < bounds_.size(); ++i) {
    if (bounds_[i] > bounds_[i - 1]) continue;
    throw Failure(kValueError, Text("bounds of a dispatch table: ", bounds_[i], " follows ",
                                    bounds_[i - 1], "; must ascend"));
  }
  for (const int64_t slot : segments_) {
    if (slot >= kAten && slot < slot_count_) continue;
    throw Failure(kValueError, Text("a segment of a dispatch table has the slot ", slot,
                                    "; must be in ", kAten, "..", slot_count_ - 1));
  }
}

int64_t DispatchTable::SlotOf(int64_t m) const {
  const auto above = std::upper_bound(bounds_.begin(), bounds_.end(), m);
  return segments_[static_cast<size_t>(above - bounds_.begin())];
}

DispatchTable::Entry DispatchTable::At(int64_t slot) const {
  Kernel* const kernel = kernels_[static_cast<size_t>(slot)].load(std::memory_order_acquire);
  const bool is_set = kernel != Unset();
  return {is_set, is_set ? kernel : nullptr};
}

void DispatchTable::Set(int64_t slot, Kernel* kernel) {
  if (slot < 0 || slot >= slot_count_) {
    throw Failure(kValueError,
                  Text("a dispatch table has no slot ", slot, "; it has ", slot_count_));
  }
  kernels_[static_cast<size_t>(slot)].store(kernel, std::memory_order_release);
}

int64_t RegisterDispatchTable(std::unique_ptr<DispatchTable> table) {
  return Tables::Instance()->Add(std::move(table));
}

DispatchTable* DispatchTableOfHandle(int64_t handle) {
  DispatchTable* const table = Tables::Instance()->At(handle);
  if (table == nullptr) {
    throw Failure(kValueError, Text("no dispatch table has the handle ", handle,
                                    "; use one that register_table returned in this process"));
  }
  return table;
}

}  // namespace nvgemm
