// The kernels of this process: appended once, found by handle or by id without a lock.

#ifndef NVGEMM_RUNTIME_CSRC_KERNEL_TABLE_H_
#define NVGEMM_RUNTIME_CSRC_KERNEL_TABLE_H_

#include <tvm/ffi/c_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "failure.h"
#include "gemm.h"

namespace nvgemm {

// Which GPUs may run a kernel: 'a' compute capability (major, minor) only, 'f' the same major and
// at least this minor, '\0' this capability and everything newer.
struct ArchitectureRule {
  int major;
  int minor;
  char suffix;
};

// How much memory a launch needs besides its operands. With a tile, it is for each tile of the
// result, and begins with bytes that must be zero; FORMAT.md has the formula.
struct WorkspaceSize {
  int64_t fixed_bytes = 0;
  int64_t tile_m = 0;  // 0 if the size is fixed
  int64_t tile_n = 0;
  int64_t multiple_m = 0;  // what the numbers of tiles are rounded up to
  int64_t multiple_n = 0;
  int64_t zeroed_once = 0;
  int64_t zeroed_per_tile = 0;
  int64_t scratch_per_tile = 0;

  bool is_needed() const { return fixed_bytes > 0 || tile_m > 0; }
};

// What a kernel was compiled for.
struct KernelSpec {
  std::string id;  // sha256 of the content, in lower-case hex
  TVMFFISafeCallType function;
  Op op;
  DLDataType a_dtype;
  DLDataType b_dtype;
  DLDataType out_dtype;
  bool a_row_major;
  bool b_row_major;
  ScaleKind scales;
  int64_t scale_block;  // values of k that share a scale, where blocks are scaled
  DLDataType scale_dtype;
  AddendKind addend;
  DLDataType addend_dtype;
  GateForm form;
  int alignment_bytes;  // of pointers, of contiguous extents and of strides other than 1
  WorkspaceSize workspace;
  int cluster_size;  // thread blocks of a cluster
  std::vector<Parameter> parameters;
  DLDeviceType device_type;
  ArchitectureRule architecture;

  // What follows from the above, which Complete() works out.
  Roles extras = 0;            // those that the kernel takes
  bool is_plain = false;       // its parameters are a, b, out and the stream, in this order
  bool needs_compact = false;  // it is given addresses, and no strides

  void Complete();

  int a_rank() const { return op == Op::kBmm ? 3 : 2; }
  int b_rank() const { return op == Op::kBmm || GroupsRows(op) ? 3 : 2; }
  int out_rank() const { return op == Op::kBmm || op == Op::kKGroupedMm ? 3 : 2; }
  int64_t OutColumns(int64_t product) const {
    return product / RatioOf(form).product * RatioOf(form).out;
  }
  int64_t ProductColumns(int64_t out) const {
    return out / RatioOf(form).out * RatioOf(form).product;
  }
};

// A kernel's name in messages: the beginning of its id.
inline std::string_view ShortId(std::string_view id) { return id.substr(0, 12); }

// A kernel and which devices have run it. Never destroyed, so a pointer to one stays valid.
struct Kernel {
  explicit Kernel(KernelSpec spec_in) : spec(std::move(spec_in)) {}

  const KernelSpec spec;
  int64_t handle = -1;
  // Bit d: device d (below 64) may run the kernel and has launched it once. What a kernel does on
  // its first call, loading its module, is not thread-safe, so `first_use` is held for it.
  std::atomic<uint64_t> ready_devices{0};
  // Whether TryServe never launches the kernel again.
  std::atomic<bool> is_given_up{false};
  std::mutex first_use;
};

// Adds a kernel. The same id again gives the kernel that is already there.
Kernel* RegisterKernel(KernelSpec spec);

// The kernel of a handle. Throws Failure if there is none.
Kernel* KernelOfHandle(int64_t handle);

// The kernel of an id; null if it is not registered.
Kernel* FindKernel(std::string_view id);

// The kernel of an id, asking the loader for it if it is not registered yet. Throws Failure if
// there is none.
Kernel* FindOrLoadKernel(std::string_view id);

// As FindOrLoadKernel, for code that was compiled for a kernel of `origin`, the distribution that
// brought it: null if there is none. The loader is told the origin, and says what is missing.
Kernel* FindOrPrepareKernel(std::string_view id, std::string_view origin);

// Sets the function that is called with an id that is not registered, and with its origin where one
// is known, and is expected to register it; null for none. Takes over the reference, and never drops
// it: another thread may be calling.
void SetLoader(TVMFFIObjectHandle function);

// Calls the reporter, if there is one, with a kernel's id, and the kind and text of a failure for
// which ATen computes in its place.
void ReportFailure(const Kernel& kernel, const Failure& failure);

// Sets the reporter; as SetLoader.
void SetReporter(TVMFFIObjectHandle function);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_KERNEL_TABLE_H_
