// Dispatch tables: from row count to kernel.

#ifndef NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_
#define NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_

#include <tvm/ffi/c_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/kernel_table.h"

namespace nvgemm {

// A dispatch table. Never destroyed, so pointers stay valid. It has one slot per
// kernel, empty until the kernel is set, so that only called kernels are loaded.
class DispatchTable {
 public:
  // Marks ATen in a segment; slots count from 0.
  static constexpr int64_t kAten = -1;

  // `segments` has one more entry than `bounds`, which ascend. Segment i covers
  // bounds[i - 1] <= m < bounds[i]. Throws Failure for other input.
  DispatchTable(int64_t slot_count, std::vector<int64_t> bounds, std::vector<int64_t> segments);

  // Returns the slot for m rows, or kAten.
  int64_t SlotOf(int64_t m) const;

  // Entry at a slot from SlotOf.
  struct Entry {
    bool is_set;     // true once a kernel or ATen is set
    Kernel* kernel;  // null for ATen
  };
  Entry At(int64_t slot) const;

  // Sets the kernel at a slot; null for ATen. Throws Failure if the slot does not exist.
  void Set(int64_t slot, Kernel* kernel);

 private:
  const std::vector<int64_t> bounds_;
  const std::vector<int64_t> segments_;
  const int64_t slot_count_;
  const std::unique_ptr<std::atomic<Kernel*>[]> kernels_;
};

// Adds a table and returns its handle. Throws Failure.
int64_t RegisterDispatchTable(std::unique_ptr<DispatchTable> table);

// Returns the table for a handle. Throws Failure if there is none.
DispatchTable* DispatchTableOfHandle(int64_t handle);

// Returns a GEMM's row count: rows in A, per matrix in a batch, over all groups. Negative if A is
// not a matrix.
inline int64_t RowsOf(const DLTensor& a) { return a.ndim < 2 ? -1 : a.shape[a.ndim - 2]; }

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_
