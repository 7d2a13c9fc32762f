// Tables that say which kernel computes a GEMM, by its number of rows.

#ifndef NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_
#define NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_

#include <tvm/ffi/c_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernel_table.h"

namespace nvgemm {

// One table. Never destroyed, so a pointer to one stays valid. A table knows its kernels by places;
// each is empty until a kernel is set there, so that only kernels that are called are loaded.
class DispatchTable {
 public:
  // What computes in a segment, besides the places from 0 on.
  static constexpr int64_t kAten = -1;

  // `segments` has one more than `bounds`, which rise: segment i is of the m from bounds[i - 1] on,
  // below bounds[i]. Throws Failure for anything else.
  DispatchTable(int64_t places, std::vector<int64_t> bounds, std::vector<int64_t> segments);

  // The place whose kernel computes m rows, or kAten.
  int64_t PlaceOf(int64_t m) const;

  // What is at a place, which PlaceOf gave.
  struct Entry {
    bool is_set;     // whether it is known what computes there
    Kernel* kernel;  // null for ATen
  };
  Entry At(int64_t place) const;

  // Sets what computes at a place from now on; null for ATen. Throws Failure if there is no such
  // place.
  void Set(int64_t place, Kernel* kernel);

 private:
  const std::vector<int64_t> bounds_;
  const std::vector<int64_t> segments_;
  const int64_t places_;
  const std::unique_ptr<std::atomic<Kernel*>[]> kernels_;
};

// Adds a table and returns its handle. Throws Failure.
int64_t RegisterDispatchTable(std::unique_ptr<DispatchTable> table);

// The table of a handle. Throws Failure if there is none.
DispatchTable* DispatchTableOfHandle(int64_t handle);

// The rows of a GEMM: those of A, of each matrix in a batch, of all groups. Negative if A is no
// matrix.
inline int64_t RowsOf(const DLTensor& a) { return a.ndim < 2 ? -1 : a.shape[a.ndim - 2]; }

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_DISPATCH_TABLE_H_
