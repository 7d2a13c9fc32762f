// Link-time stand-in for libtorch_cpu.so. It has the same SONAME and defines the functions in
// torch_shim.h, so that the linker can bind the launcher without torch. It is never installed; in a
// process, the loader binds to the libtorch_cpu.so that `import torch` loaded.

#include "torch/torch_shim.h"

#define NVGEMM_STUB(result, name, ...) \
  result name(__VA_ARGS__) { __builtin_trap(); }

namespace nvgemm::torch_shim {

extern "C" {

NVGEMM_STUB(int32_t, aoti_torch_device_type_cpu)
NVGEMM_STUB(int32_t, aoti_torch_device_type_cuda)
NVGEMM_STUB(Error, aoti_torch_get_data_ptr, Tensor, void**)
NVGEMM_STUB(Error, aoti_torch_get_dim, Tensor, int64_t*)
NVGEMM_STUB(Error, aoti_torch_get_sizes, Tensor, int64_t**)
NVGEMM_STUB(Error, aoti_torch_get_strides, Tensor, int64_t**)
NVGEMM_STUB(Error, aoti_torch_get_dtype, Tensor, int32_t*)
NVGEMM_STUB(Error, aoti_torch_get_device_type, Tensor, int32_t*)
NVGEMM_STUB(Error, aoti_torch_get_device_index, Tensor, int32_t*)
NVGEMM_STUB(Error, aoti_torch_empty_strided, int64_t, const int64_t*, const int64_t*, int32_t,
            int32_t, int32_t, Tensor*)
NVGEMM_STUB(Error, aoti_torch_new_tensor_handle, Tensor, Tensor*)
NVGEMM_STUB(Error, aoti_torch_delete_tensor_object, Tensor)
NVGEMM_STUB(Error, aoti_torch_as_strided, Tensor, const int64_t*, const int64_t*, Tensor*)
NVGEMM_STUB(Error, aoti_torch_zero_, Tensor)
NVGEMM_STUB(void, aoti_torch_check, bool, const char*, const char*, uint32_t, const char*)
NVGEMM_STUB(Error, aoti_torch_library_init_fragment, const char*, const char*, uint32_t, Library*)
NVGEMM_STUB(Error, aoti_torch_library_init_impl, const char*, const char*, const char*, uint32_t,
            Library*)
NVGEMM_STUB(Error, aoti_torch_library_def, Library, const char*)
NVGEMM_STUB(Error, torch_library_impl, Library, const char*, BoxedKernel, uint64_t)
NVGEMM_STUB(Error, torch_call_dispatcher, const char*, const char*, Value*, uint64_t)
NVGEMM_STUB(Error, torch_string_length, String, size_t*)
NVGEMM_STUB(Error, torch_string_c_str, String, const char**)
NVGEMM_STUB(Error, torch_delete_string, String)

}  // extern "C"

}  // namespace nvgemm::torch_shim
