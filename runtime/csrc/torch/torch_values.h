// torch tensors and strings, over its stable C ABI.

#ifndef NVGEMM_RUNTIME_CSRC_TORCH_VALUES_H_
#define NVGEMM_RUNTIME_CSRC_TORCH_VALUES_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <string_view>
#include <utility>

#include "core/kernel_table.h"
#include "torch/torch_shim.h"

namespace nvgemm {

// An owning torch handle.
template <typename Handle, torch_shim::Error (*Delete)(Handle)>
class Owned {
 public:
  explicit Owned(Handle handle) : handle_(handle) {}
  explicit Owned(torch_shim::Value value) : handle_(reinterpret_cast<Handle>(value)) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&&) = delete;
  ~Owned() {
    if (handle_ != nullptr) Delete(handle_);
  }

  Handle get() const { return handle_; }
  torch_shim::Value Release() {
    return reinterpret_cast<torch_shim::Value>(std::exchange(handle_, nullptr));
  }

 private:
  Handle handle_;
};

using OwnedTensor = Owned<torch_shim::Tensor, torch_shim::aoti_torch_delete_tensor_object>;
using OwnedString = Owned<torch_shim::String, torch_shim::torch_delete_string>;

// Throws Failure with torch's message if a function of torch reports an error.
void Check(torch_shim::Error error, const char* function);

// Returns a string's text, valid as long as the string.
std::string_view ViewOf(const OwnedString& string);

// Returns a view that borrows the tensor's shape and strides. A dtype or device that no kernel has
// becomes one that compares equal to none.
DLTensor ViewOf(const OwnedTensor& tensor);

// Allocates uninitialized device memory from torch's allocator: work enqueued on torch's current
// stream may use it even after it is freed, like any temporary torch tensor.
OwnedTensor AllocateBytes(DLDevice device, int64_t bytes);

// Allocates a row-major tensor for a @ b, on a's device. It has `count` matrices for groups along
// k, or `count` rows for gathered groups.
OwnedTensor AllocateResult(const KernelSpec& spec, const DLTensor& a, const DLTensor& b,
                           int64_t count);

// Tells autograd that the operator writes a tensor, so that backward() refuses values saved before.
// Throws Failure if torch forbids writing to it.
void MarkWritten(const OwnedTensor& tensor);

// Returns torch's current stream for a CUDA device. Throws Failure if torch has no CUDA.
void* CurrentCudaStream(int32_t device_index);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_TORCH_VALUES_H_
