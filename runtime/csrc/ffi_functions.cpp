// What Python calls, as TVM-FFI functions: TVM-FFI finds `name` as the symbol __tvm_ffi_<name>.
// native.py says what each takes and returns.

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "failure.h"
#include "kernel_image.h"
#include "kernel_table.h"
#include "launch.h"
#include "torch_ops.h"

#define NVGEMM_EXPORT extern "C" __attribute__((visibility("default")))

namespace nvgemm {
namespace {

// Runs a body and turns what it throws into an error of TVM-FFI; no exception passes a C boundary.
template <typename Body>
int Guarded(const Body& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Failure& failure) {
    TVMFFIErrorSetRaisedFromCStr(failure.kind(), failure.what());
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr(kRuntimeError, error.what());
  }
  return -1;
}

// Positional arguments of one call. Each getter throws Failure if the argument is of another type.
class Arguments {
 public:
  Arguments(const char* function, const TVMFFIAny* values, int32_t count, int32_t expected)
      : function_(function), values_(values) {
    if (count == expected) return;
    throw Failure(kTypeError,
                  Text(function, " takes ", expected, " arguments (", count, " given)"));
  }

  int64_t Integer(int at, const char* name) const {
    if (values_[at].type_index != kTVMFFIInt && values_[at].type_index != kTVMFFIBool) {
      Refuse(name, "an int");
    }
    return values_[at].v_int64;
  }

  int64_t IntegerIn(int at, const char* name, int64_t least, int64_t most) const {
    const int64_t value = Integer(at, name);
    if (value < least || value > most) {
      throw Failure(kValueError, Text(function_, ": ", name, " is ", value, "; must be in ", least,
                                      "..", most));
    }
    return value;
  }

  bool Bool(int at, const char* name) const { return IntegerIn(at, name, 0, 1) != 0; }

  DLDataType DType(int at, const char* name) const {
    if (values_[at].type_index != kTVMFFIDataType) Refuse(name, "a dtype");
    const DLDataType dtype = values_[at].v_dtype;
    if (dtype.bits == 0 || dtype.bits % 8 != 0 || dtype.lanes != 1) {
      throw Failure(kValueError, Text(function_, ": ", name, " has ", dtype.bits, " bits and ",
                                      dtype.lanes, " lanes; must have whole bytes and 1 lane"));
    }
    return dtype;
  }

  // Valid as long as the arguments are.
  std::string_view String(int at, const char* name) const {
    const TVMFFIAny& value = values_[at];
    if (value.type_index == kTVMFFIRawStr) return value.v_c_str;
    if (value.type_index == kTVMFFISmallStr) {
      return View(TVMFFISmallBytesGetContentByteArray(&value));
    }
    if (value.type_index == kTVMFFIStr) return View(*TVMFFIBytesGetByteArrayPtr(value.v_obj));
    Refuse(name, "a str");
  }

  // Valid as long as the arguments are.
  std::string_view Bytes(int at, const char* name) const {
    const TVMFFIAny& value = values_[at];
    if (value.type_index == kTVMFFIByteArrayPtr) {
      return View(*static_cast<TVMFFIByteArray*>(value.v_ptr));
    }
    if (value.type_index == kTVMFFISmallBytes) {
      return View(TVMFFISmallBytesGetContentByteArray(&value));
    }
    if (value.type_index == kTVMFFIBytes) return View(*TVMFFIBytesGetByteArrayPtr(value.v_obj));
    Refuse(name, "bytes");
  }

  const DLTensor& Tensor(int at, const char* name) const {
    const TVMFFIAny& value = values_[at];
    if (value.type_index == kTVMFFIDLTensorPtr) return *static_cast<DLTensor*>(value.v_ptr);
    if (value.type_index == kTVMFFITensor) return *TVMFFITensorGetDLTensorPtr(value.v_obj);
    Refuse(name, "a tensor");
  }

  // A new reference, or null for None.
  TVMFFIObjectHandle FunctionOrNone(int at, const char* name) const {
    const TVMFFIAny& value = values_[at];
    if (value.type_index == kTVMFFINone) return nullptr;
    if (value.type_index != kTVMFFIFunction) Refuse(name, "a function or None");
    TVMFFIObjectIncRef(value.v_obj);
    return value.v_obj;
  }

 private:
  static std::string_view View(TVMFFIByteArray bytes) { return {bytes.data, bytes.size}; }

  [[noreturn]] void Refuse(const char* name, const char* wanted) const {
    throw Failure(kTypeError, Text(function_, ": ", name, " must be ", wanted));
  }

  const char* const function_;
  const TVMFFIAny* const values_;
};

void Return(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = value;
}

KernelSpec SpecOf(const Arguments& arguments) {
  const int64_t alignment = arguments.IntegerIn(2, "alignment_bytes", 1, 4096);
  if ((alignment & (alignment - 1)) != 0) {
    throw Failure(kValueError, Text("register_kernel: alignment_bytes is ", alignment,
                                    "; must be a power of two"));
  }
  const std::string_view suffix = arguments.String(13, "suffix");
  if (suffix != "" && suffix != "a" && suffix != "f") {
    throw Failure(kValueError,
                  Text("register_kernel: suffix is '", suffix, "'; must be '', 'a' or 'f'"));
  }
  const int64_t device_type = arguments.Integer(10, "device_type");
  if (device_type != kDLCPU && device_type != kDLCUDA) {
    throw Failure(kValueError, Text("register_kernel: device_type is ", device_type, "; must be ",
                                    static_cast<int>(kDLCPU), " (cpu) or ",
                                    static_cast<int>(kDLCUDA), " (cuda)"));
  }
  const int64_t workspace = arguments.Integer(3, "workspace_bytes");
  if (workspace != 0) {
    throw Failure(kValueError, Text("register_kernel: the kernel needs a workspace of ", workspace,
                                    " bytes; this version launches only kernels that need none"));
  }
  const int64_t address = arguments.IntegerIn(1, "function_address", 1, INT64_MAX);
  return KernelSpec{std::string(arguments.String(0, "id")),
                    reinterpret_cast<TVMFFISafeCallType>(address),
                    static_cast<int>(arguments.IntegerIn(4, "rank", 2, 3)),
                    arguments.DType(5, "a"),
                    arguments.DType(6, "b"),
                    arguments.DType(7, "out"),
                    arguments.Bool(8, "a_row_major"),
                    arguments.Bool(9, "b_row_major"),
                    static_cast<int>(alignment),
                    static_cast<DLDeviceType>(device_type),
                    {static_cast<int>(arguments.IntegerIn(11, "major", 0, 99)),
                     static_cast<int>(arguments.IntegerIn(12, "minor", 0, 9)),
                     suffix.empty() ? '\0' : suffix.front()}};
}

}  // namespace
}  // namespace nvgemm

using nvgemm::Arguments;
using nvgemm::Guarded;

NVGEMM_EXPORT int __tvm_ffi_launch(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("launch", values, count, 4);
    nvgemm::Launch(nvgemm::KernelOfHandle(arguments.Integer(0, "handle")),
                   arguments.Tensor(1, "a"), arguments.Tensor(2, "b"), arguments.Tensor(3, "out"));
  });
}

NVGEMM_EXPORT int __tvm_ffi_try_launch(void*, const TVMFFIAny* values, int32_t count,
                                       TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("try_launch", values, count, 4);
    result->type_index = kTVMFFIBool;
    result->v_int64 = nvgemm::TryLaunch(
        nvgemm::KernelOfHandle(arguments.Integer(0, "handle")), arguments.Tensor(1, "a"),
        arguments.Tensor(2, "b"), arguments.Tensor(3, "out"));
  });
}

NVGEMM_EXPORT int __tvm_ffi_open_kernel(void*, const TVMFFIAny* values, int32_t count,
                                        TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("open_kernel", values, count, 3);
    const uintptr_t address = nvgemm::OpenKernelImage(arguments.Bytes(0, "image"),
                                                      std::string(arguments.String(1, "symbol")),
                                                      arguments.String(2, "name"));
    nvgemm::Return(result, static_cast<int64_t>(address));
  });
}

NVGEMM_EXPORT int __tvm_ffi_register_kernel(void*, const TVMFFIAny* values, int32_t count,
                                            TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("register_kernel", values, count, 14);
    nvgemm::Return(result, nvgemm::RegisterKernel(nvgemm::SpecOf(arguments))->handle);
  });
}

NVGEMM_EXPORT int __tvm_ffi_find_kernel(void*, const TVMFFIAny* values, int32_t count,
                                        TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("find_kernel", values, count, 1);
    const nvgemm::Kernel* kernel = nvgemm::FindKernel(arguments.String(0, "id"));
    if (kernel != nullptr) nvgemm::Return(result, kernel->handle);
  });
}

NVGEMM_EXPORT int __tvm_ffi_out_dtype(void*, const TVMFFIAny* values, int32_t count,
                                      TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("out_dtype", values, count, 1);
    const nvgemm::Kernel* kernel = nvgemm::FindOrLoadKernel(arguments.String(0, "id"));
    result->type_index = kTVMFFIDataType;
    result->v_dtype = kernel->spec.out_dtype;
  });
}

NVGEMM_EXPORT int __tvm_ffi_set_loader(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("set_loader", values, count, 1);
    nvgemm::SetLoader(arguments.FunctionOrNone(0, "loader"));
  });
}

NVGEMM_EXPORT int __tvm_ffi_register_torch_ops(void*, const TVMFFIAny* values, int32_t count,
                                               TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("register_torch_ops", values, count, 0);
    nvgemm::RegisterTorchOps();
  });
}

// Looked up by code that torch generated: cpp.py writes it.
NVGEMM_EXPORT int64_t nvgemm_aot_operators_abi() { return nvgemm::RegisteredAbi(); }

NVGEMM_EXPORT int __tvm_ffi_abi(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  nvgemm::Return(result, nvgemm::kAbi);
  return 0;
}
