// Dispatch tables: from row count to kernel.

#ifndef NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_
#define NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_

#include <tvm/ffi/c_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernel_table.h"

namespace nvgemm {

// A dispatch table. Never destroyed, so pointers stay valid. It refers to kernels by index
// ("place"); each place is empty until a kernel is set there, so that only called kernels are
// loaded.
class DispatchTable {
 public:
  // Marks ATen in a segment; places count from 0.
  static constexpr int64_t kAten = -1;

  // `segments` has one more entry than `bounds`, which ascend: segment i covers m from bounds[i -
  // 1], below bounds[i]. Throws Failure otherwise.
  DispatchTable(int64_t places, std::vector<int64_t> bounds, std::vector<int64_t> segments);

  // Returns the place for m rows, or kAten.
  int64_t PlaceOf(int64_t m) const;

  // Entry at a place from PlaceOf.
  struct Entry {
    bool is_set;     // true once a kernel or ATen is set
    Kernel* kernel;  // null for ATen
  };
  Entry At(int64_t place) const;

  // Sets the kernel at a place; null for ATen. Throws Failure if the place does not exist.
  void Set(int64_t place, Kernel* kernel);

 private:
  const std::vector<int64_t> bounds_;
  const std::vector<int64_t> segments_;
  const int64_t places_;
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
