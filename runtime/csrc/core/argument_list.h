// Arguments for one call to a kernel's function, in calling convention order.

#ifndef NVGEMM_RUNTIME_CSRC_ARGUMENT_LIST_H_
#define NVGEMM_RUNTIME_CSRC_ARGUMENT_LIST_H_

#include <tvm/ffi/c_api.h>

#include <optional>

#include "checks/check.h"
#include "torch/torch_values.h"

namespace nvgemm {

// A launch's workspace bytes: the prefix that must be zero, and all.
struct WorkspaceBytes {
  int64_t zeroed;
  int64_t total;
};

// Returns the workspace that a checked call needs. Throws Failure if its size overflows.
WorkspaceBytes BytesOf(const KernelSpec& spec, const CheckedCall& call);

// Refers to the call and owns all other arguments. Must live until the function has returned; by
// then the work is enqueued.
class ArgumentList {
 public:
  // Allocates the workspace and enqueues zeroing its prefix. Throws Failure, with kind
  // kOutOfMemoryError if memory cannot be allocated.
  ArgumentList(const KernelSpec& spec, CheckedCall* call, void* stream);
  ~ArgumentList();
  ArgumentList(const ArgumentList&) = delete;
  ArgumentList& operator=(const ArgumentList&) = delete;

  const TVMFFIAny* data() const { return arguments_; }
  int size() const { return size_; }

 private:
  TVMFFIAny arguments_[kMaxParameters] = {};
  int size_ = 0;
  TVMFFIObjectHandle mnkl_ = nullptr;
  std::optional<OwnedTensor> workspace_;
  DLTensor workspace_view_{};
};

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_ARGUMENT_LIST_H_
