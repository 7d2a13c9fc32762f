// Part of torch's stable C ABI that this library calls, copied so that the build does not need
// torch.
//
// Each declaration names its torch header and the torch version that introduced it. "< 2.10" means
// that the header declares it without a version guard; guards begin with 2.10. Nothing newer than
// 2.11, the oldest supported torch, may be added, except through dlsym.
//
// aoti/shim.h is torch/csrc/inductor/aoti_torch/c/shim.h and stable/shim.h is
// torch/csrc/stable/c/shim.h.

#ifndef NVGEMM_RUNTIME_CSRC_TORCH_SHIM_H_
#define NVGEMM_RUNTIME_CSRC_TORCH_SHIM_H_

#include <cstddef>
#include <cstdint>

// The stub library defines these functions for the linker, hence "default".
#define NVGEMM_TORCH_API __attribute__((visibility("default")))

namespace nvgemm::torch_shim {

// Version whose value conversions this library expects, in torch's encoding: major in the top byte,
// minor in the next (torch/headeronly/version.h).
inline constexpr uint64_t kBuildVersion = (uint64_t{2} << 56) | (uint64_t{11} << 48);

// 0 is success (AOTI_TORCH_SUCCESS in torch/csrc/inductor/aoti_torch/c/macros.h).
using Error = int32_t;

struct TensorOpaque;
using Tensor = TensorOpaque*;

struct LibraryOpaque;
using Library = LibraryOpaque*;

struct StringOpaque;
using String = StringOpaque*;

// An operator's argument or result: an owning Tensor or String, or an int, in 64 bits (aoti/shim.h,
// < 2.10; strings in stable/stableivalue_conversions.h, 2.10). An optional one is null or the
// address of such a value, which the taker deletes (the same header, "Handling std::optional", as
// for libraries built for a torch before 2.13).
using Value = uint64_t;

// An operator's implementation: takes ownership of `argument_count` values and leaves
// `result_count` owning ones (stable/library.h, < 2.10). Fails by throwing an exception.
using BoxedKernel = void (*)(Value* stack, uint64_t argument_count, uint64_t result_count);

extern "C" {

// aoti/shim.h, < 2.10. Device type numbers; the values themselves are not stable.
NVGEMM_TORCH_API int32_t aoti_torch_device_type_cpu();
NVGEMM_TORCH_API int32_t aoti_torch_device_type_cuda();

// aoti/shim.h, < 2.10. Sizes and strides are borrowed from the tensor.
NVGEMM_TORCH_API Error aoti_torch_get_data_ptr(Tensor tensor, void** data);
NVGEMM_TORCH_API Error aoti_torch_get_dim(Tensor tensor, int64_t* rank);
NVGEMM_TORCH_API Error aoti_torch_get_sizes(Tensor tensor, int64_t** sizes);
NVGEMM_TORCH_API Error aoti_torch_get_strides(Tensor tensor, int64_t** strides);
NVGEMM_TORCH_API Error aoti_torch_get_dtype(Tensor tensor, int32_t* dtype);
NVGEMM_TORCH_API Error aoti_torch_get_device_type(Tensor tensor, int32_t* device_type);
NVGEMM_TORCH_API Error aoti_torch_get_device_index(Tensor tensor, int32_t* device_index);

// aoti/shim.h, < 2.10. The caller owns the new tensor and the new handle.
NVGEMM_TORCH_API Error aoti_torch_empty_strided(int64_t rank, const int64_t* sizes,
                                                const int64_t* strides, int32_t dtype,
                                                int32_t device_type, int32_t device_index,
                                                Tensor* tensor);
NVGEMM_TORCH_API Error aoti_torch_new_tensor_handle(Tensor tensor, Tensor* handle);
NVGEMM_TORCH_API Error aoti_torch_delete_tensor_object(Tensor tensor);

// aoti/shim.h, < 2.10. The view has the tensor's rank; the caller owns it.
NVGEMM_TORCH_API Error aoti_torch_as_strided(Tensor tensor, const int64_t* sizes,
                                             const int64_t* strides, Tensor* view);
NVGEMM_TORCH_API Error aoti_torch_zero_(Tensor tensor);

// aoti/shim.h, < 2.10. Throws torch's exception, with `message`, if `condition` is false.
NVGEMM_TORCH_API void aoti_torch_check(bool condition, const char* function, const char* file,
                                       uint32_t line, const char* message);

// aoti/shim.h, < 2.10. Registrations last until the library object is deleted.
NVGEMM_TORCH_API Error aoti_torch_library_init_fragment(const char* name_space, const char* file,
                                                        uint32_t line, Library* library);
NVGEMM_TORCH_API Error aoti_torch_library_init_impl(const char* name_space,
                                                    const char* dispatch_key, const char* file,
                                                    uint32_t line, Library* library);
NVGEMM_TORCH_API Error aoti_torch_library_def(Library library, const char* schema);

// stable/shim.h, 2.10.
NVGEMM_TORCH_API Error torch_library_impl(Library library, const char* name, BoxedKernel kernel,
                                          uint64_t build_version);
NVGEMM_TORCH_API Error torch_call_dispatcher(const char* name, const char* overload, Value* stack,
                                             uint64_t build_version);
NVGEMM_TORCH_API Error torch_string_length(String string, size_t* length);
NVGEMM_TORCH_API Error torch_string_c_str(String string, const char** text);
NVGEMM_TORCH_API Error torch_delete_string(String string);

}  // extern "C"

// aoti/shim.h, < 2.10, in libtorch_cuda: found with dlsym, because a torch without CUDA lacks it.
using GetCurrentCudaStream = Error (*)(int32_t device_index, void** stream);
inline constexpr char kGetCurrentCudaStream[] = "aoti_torch_get_current_cuda_stream";

// aoti/shim.h: returns a dtype's number; the function name ends with the dtype's. Found with dlsym,
// because torch before 2.12 lacks float8_e8m0fnu and float4_e2m1fn_x2.
using GetNumber = int32_t (*)();
inline constexpr char kDTypePrefix[] = "aoti_torch_dtype_";

// stable/shim.h, 2.13: returns this thread's last exception message. Found with dlsym.
using GetExceptionText = const char* (*)();
inline constexpr char kGetExceptionText[] = "torch_exception_get_what_without_backtrace";

}  // namespace nvgemm::torch_shim

#endif  // NVGEMM_RUNTIME_CSRC_TORCH_SHIM_H_
