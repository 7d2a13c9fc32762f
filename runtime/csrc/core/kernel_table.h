// Kernels in this process: appended once, found by handle or id without a lock.

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

#include "core/failure.h"
#include "core/gemm.h"

namespace nvgemm {

// GPUs that may run a kernel: 'a' compute capability (major, minor) only, 'f' the same major and at
// least this minor, '\0' this capability and everything newer.
struct ArchitectureRule {
  int major;
  int minor;
  char suffix;
};

// Memory that a launch needs in addition to operands. With a tile, the size scales with the
// result's tiles, and a prefix must be zero; FORMAT.md has the formula.
struct WorkspaceSize {
  int64_t fixed_bytes = 0;
  int64_t tile_m = 0;  // 0 if the size is fixed
  int64_t tile_n = 0;
  int64_t multiple_m = 0;  // tile counts are rounded up to multiples of these
  int64_t multiple_n = 0;
  int64_t zeroed_once = 0;
  int64_t zeroed_per_tile = 0;
  int64_t scratch_per_tile = 0;

  bool is_needed() const { return fixed_bytes > 0 || tile_m > 0; }
};

// Specification that a kernel was compiled for.
struct KernelSpec {
  std::string id;  // content sha256, in lower-case hex
  TVMFFISafeCallType function;
  Op op;
  DLDataType a_dtype;
  DLDataType b_dtype;
  DLDataType out_dtype;
  bool a_row_major;
  bool b_row_major;
  ScaleKind scales;
  int64_t scale_block;  // values along k that share a scale, for block scales
  DLDataType scale_dtype;
  AddendKind addend;
  DLDataType addend_dtype;
  GateForm form;
  int alignment_bytes;  // for pointers, contiguous extents and strides other than 1
  WorkspaceSize workspace;
  int cluster_size;  // thread blocks per cluster
  std::vector<Parameter> parameters;
  DLDeviceType device_type;
  ArchitectureRule architecture;

  // Derived by Complete().
  Roles extras = 0;            // extras that the kernel takes
  bool is_plain = false;       // parameters are a, b, out and the stream, in this order
  bool needs_compact = false;  // takes addresses without strides

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

// Returns a kernel's name for messages: a prefix of its id.
inline std::string_view ShortId(std::string_view id) { return id.substr(0, 12); }

// A kernel and the devices that have run it. Never destroyed, so pointers stay valid.
struct Kernel {
  explicit Kernel(KernelSpec spec_in) : spec(std::move(spec_in)) {}

  const KernelSpec spec;
  int64_t handle = -1;
  // Bit d: device d (below 64) may run the kernel and has launched it once. A kernel's first call,
  // which loads its module, is not thread-safe, so it holds `first_use`.
  std::atomic<uint64_t> ready_devices{0};
  // True if TryServe must not launch the kernel again.
  std::atomic<bool> is_given_up{false};
  std::mutex first_use;
};

// Adds a kernel; returns the existing one for the same id.
Kernel* RegisterKernel(KernelSpec spec);

// Returns the kernel for a handle. Throws Failure if there is none.
Kernel* KernelOfHandle(int64_t handle);

// Returns the kernel for an id; null if it is not registered.
Kernel* FindKernel(std::string_view id);

// Returns the kernel for an id; calls the loader if it is not registered. Throws Failure if there
// is none.
Kernel* FindOrLoadKernel(std::string_view id);

// Like FindOrLoadKernel, for code compiled for a kernel from the distribution `origin`. Returns
// null if there is none; the loader, which receives the origin, reports the missing kernel.
Kernel* FindOrPrepareKernel(std::string_view id, std::string_view origin);

// Sets the callback for an unregistered id and, if known, its origin; it must register the kernel.
// Null removes it. Takes over the reference and never drops it, because another thread may be
// calling.
void SetLoader(TVMFFIObjectHandle function);

// Calls the reporter, if any, with the kernel id, and the kind and text of a failure for which ATen
// computes instead.
void ReportFailure(const Kernel& kernel, const Failure& failure);

// Sets the reporter; see SetLoader.
void SetReporter(TVMFFIObjectHandle function);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_KERNEL_TABLE_H_
