// Functions that Python calls through TVM-FFI, which finds `name` as the symbol __tvm_ffi_<name>.
// native.py documents their arguments and results.

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "driver/cuda_driver.h"
#include "core/dispatch_table.h"
#include "core/failure.h"
#include "core/kernel_image.h"
#include "core/kernel_table.h"
#include "core/launch.h"
#include "torch/torch_ops.h"

#define NVGEMM_EXPORT extern "C" __attribute__((visibility("default")))

namespace nvgemm {
namespace {

// Runs a body and turns exceptions into TVM-FFI errors; none may cross a C boundary.
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

// Positional arguments for one call. Each getter throws Failure for a wrong type.
class Arguments {
 public:
  Arguments(const char* function, const TVMFFIAny* values, int32_t count, int32_t least,
            int32_t most)
      : function_(function), values_(values), count_(count) {
    if (count >= least && count <= most) return;
    throw Failure(kTypeError, Text(function, " takes ", least == most ? "" : "at least ", least,
                                   " arguments (", count, " given)"));
  }
  Arguments(const char* function, const TVMFFIAny* values, int32_t count, int32_t expected)
      : Arguments(function, values, count, expected, expected) {}

  int32_t count() const { return count_; }

  int64_t Integer(int at, const char* name) const {
    if (values_[at].type_index != kTVMFFIInt && values_[at].type_index != kTVMFFIBool) {
      Refuse(name, "an int");
    }
    return values_[at].v_int64;
  }

  bool Bool(int at, const char* name) const { return Integer(at, name) != 0; }

  DLDataType DType(int at, const char* name) const {
    if (values_[at].type_index != kTVMFFIDataType) Refuse(name, "a dtype");
    return values_[at].v_dtype;
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

  // Returns a new reference, or null for None.
  TVMFFIObjectHandle FunctionOrNone(int at, const char* name) const {
    const TVMFFIAny& value = values_[at];
    if (value.type_index == kTVMFFINone) return nullptr;
    if (value.type_index != kTVMFFIFunction) Refuse(name, "a function or None");
    TVMFFIObjectIncRef(value.v_obj);
    return value.v_obj;
  }

 private:
  static std::string_view View(TVMFFIByteArray bytes) { return {bytes.data, bytes.size}; }

  [[noreturn]] void Refuse(const char* name, const char* expected) const {
    throw Failure(kTypeError, Text(function_, ": ", name, " must be ", expected));
  }

  const char* const function_;
  const TVMFFIAny* const values_;
  const int32_t count_;
};

// Arguments to launch without extras: handle, a, b and out.
constexpr int kPlainArguments = 4;

void Return(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = value;
}

// Positions of the arguments from native.py's register_kernel.
enum Registered {
  kId, kFunctionAddress, kAlignment, kWorkspace, kTileM, kTileN, kMultipleM, kMultipleN,
  kZeroedOnce, kZeroedPerTile, kScratchPerTile, kClusterSize, kOp, kA, kB, kOut, kARowMajor, kBRowMajor,
  kScales, kScaleBlock, kScaleDType, kAddend, kAddendDType, kGateForm, kDeviceType, kMajor, kMinor, kSuffix,
  kFirstParameter,
};

Parameter ParameterOf(std::string_view text) {
  using Kind = Parameter::Kind;
  if (text == "mnkl") return {Kind::kMnkl, Role::kA};
  if (text == "workspace") return {Kind::kWorkspace, Role::kA};
  if (text == "clusters") return {Kind::kClusters, Role::kA};
  if (text == "stream") return {Kind::kStream, Role::kA};
  const bool is_pointer = !text.empty() && text.back() == '*';
  const std::string_view name = text.substr(0, text.size() - (is_pointer ? 1 : 0));
  for (int i = 0; i < kRoles; ++i) {
    const Role role = static_cast<Role>(i);
    if (name == RoleName(role)) return {is_pointer ? Kind::kPointer : Kind::kTensor, role};
  }
  throw Failure(kValueError, Text("register_kernel: no parameter is called '", text, "'"));
}

std::vector<Parameter> ParametersOf(const Arguments& arguments) {
  if (arguments.count() > kFirstParameter + kMaxParameters) {
    throw Failure(kValueError, Text("register_kernel: a function takes ",
                                    arguments.count() - kFirstParameter,
                                    " parameters; must be at most ", kMaxParameters));
  }
  std::vector<Parameter> parameters;
  for (int i = kFirstParameter; i < arguments.count(); ++i) {
    parameters.push_back(ParameterOf(arguments.String(i, "parameter")));
  }
  return parameters;
}

WorkspaceSize WorkspaceOf(const Arguments& arguments) {
  WorkspaceSize size;
  size.fixed_bytes = arguments.Integer(kWorkspace, "workspace_bytes");
  size.tile_m = arguments.Integer(kTileM, "tile_m");
  size.tile_n = arguments.Integer(kTileN, "tile_n");
  size.multiple_m = arguments.Integer(kMultipleM, "multiple_m");
  size.multiple_n = arguments.Integer(kMultipleN, "multiple_n");
  size.zeroed_once = arguments.Integer(kZeroedOnce, "zeroed_once");
  size.zeroed_per_tile = arguments.Integer(kZeroedPerTile, "zeroed_per_tile");
  size.scratch_per_tile = arguments.Integer(kScratchPerTile, "scratch_per_tile");
  return size;
}

// Python has checked that values are in range and parameters fit the rest.
KernelSpec SpecOf(const Arguments& arguments) {
  const std::string_view suffix = arguments.String(kSuffix, "suffix");
  KernelSpec spec{};
  spec.id = std::string(arguments.String(kId, "id"));
  spec.function = reinterpret_cast<TVMFFISafeCallType>(
      arguments.Integer(kFunctionAddress, "function_address"));
  spec.op = static_cast<Op>(arguments.Integer(kOp, "op"));
  spec.a_dtype = arguments.DType(kA, "a");
  spec.b_dtype = arguments.DType(kB, "b");
  spec.out_dtype = arguments.DType(kOut, "out");
  spec.a_row_major = arguments.Bool(kARowMajor, "a_row_major");
  spec.b_row_major = arguments.Bool(kBRowMajor, "b_row_major");
  spec.scales = static_cast<ScaleKind>(arguments.Integer(kScales, "scales"));
  spec.scale_block = arguments.Integer(kScaleBlock, "scale_block");
  spec.scale_dtype = arguments.DType(kScaleDType, "scale_dtype");
  spec.addend = static_cast<AddendKind>(arguments.Integer(kAddend, "addend"));
  spec.addend_dtype = arguments.DType(kAddendDType, "addend_dtype");
  spec.form = static_cast<GateForm>(arguments.Integer(kGateForm, "form"));
  spec.alignment_bytes = static_cast<int>(arguments.Integer(kAlignment, "alignment_bytes"));
  spec.workspace = WorkspaceOf(arguments);
  spec.cluster_size = static_cast<int>(arguments.Integer(kClusterSize, "cluster_size"));
  spec.parameters = ParametersOf(arguments);
  spec.device_type = static_cast<DLDeviceType>(arguments.Integer(kDeviceType, "device_type"));
  spec.architecture = {static_cast<int>(arguments.Integer(kMajor, "major")),
                       static_cast<int>(arguments.Integer(kMinor, "minor")),
                       suffix.empty() ? '\0' : suffix.front()};
  spec.Complete();
  return spec;
}

// Reads the number of kernels, the first segment's slot, and each further segment's bound and
// slot.
std::unique_ptr<DispatchTable> TableOf(const Arguments& arguments) {
  if (arguments.count() % 2 != 0) {
    throw Failure(kTypeError, "register_table: a bound has no segment slot");
  }
  std::vector<int64_t> bounds;
  std::vector<int64_t> segments{arguments.Integer(1, "slot")};
  for (int i = 2; i < arguments.count(); i += 2) {
    bounds.push_back(arguments.Integer(i, "bound"));
    segments.push_back(arguments.Integer(i + 1, "slot"));
  }
  return std::make_unique<DispatchTable>(arguments.Integer(0, "slots"), std::move(bounds),
                                         std::move(segments));
}

// Reads tensors from the second argument on: a, b, out, and the kernel's extras.
Operands OperandsOf(const Arguments& arguments, const KernelSpec& spec) {
  Operands operands(arguments.Tensor(1, "a"), arguments.Tensor(2, "b"),
                    arguments.Tensor(3, "out"));
  int at = kPlainArguments;
  if (spec.extras == 0 && at == arguments.count()) return operands;
  for (const Role role : kExtras) {
    if ((spec.extras & SetOf(role)) == 0 || at == arguments.count()) continue;
    operands.Set(role, arguments.Tensor(at, RoleName(role)));
    ++at;
  }
  if (at == arguments.count()) return operands;
  throw Failure(kTypeError, Text("kernel ", ShortId(spec.id), " (", OpName(spec.op), "): ",
                                 "got ", arguments.count() - kPlainArguments,
                                 " extra tensors; the kernel takes ",
                                 at - kPlainArguments));
}

}  // namespace
}  // namespace nvgemm

using nvgemm::Arguments;
using nvgemm::Guarded;

NVGEMM_EXPORT int __tvm_ffi_launch(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("launch", values, count, nvgemm::kPlainArguments, INT32_MAX);
    nvgemm::Kernel* kernel = nvgemm::KernelOfHandle(arguments.Integer(0, "handle"));
    nvgemm::Launch(kernel, nvgemm::OperandsOf(arguments, kernel->spec));
  });
}

NVGEMM_EXPORT int __tvm_ffi_try_launch(void*, const TVMFFIAny* values, int32_t count,
                                       TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("try_launch", values, count, nvgemm::kPlainArguments, INT32_MAX);
    nvgemm::Kernel* kernel = nvgemm::KernelOfHandle(arguments.Integer(0, "handle"));
    result->type_index = kTVMFFIBool;
    result->v_int64 = nvgemm::TryLaunch(kernel, nvgemm::OperandsOf(arguments, kernel->spec));
  });
}

NVGEMM_EXPORT int __tvm_ffi_try_dispatch(void*, const TVMFFIAny* values, int32_t count,
                                         TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("try_dispatch", values, count, nvgemm::kPlainArguments, INT32_MAX);
    const auto* table = nvgemm::DispatchTableOfHandle(arguments.Integer(0, "table"));
    const int64_t slot = table->SlotOf(nvgemm::RowsOf(arguments.Tensor(1, "a")));
    result->type_index = kTVMFFIBool;
    result->v_int64 = false;
    if (slot == nvgemm::DispatchTable::kAten) return;
    const nvgemm::DispatchTable::Entry entry = table->At(slot);
    if (!entry.is_set) return nvgemm::Return(result, slot);
    if (entry.kernel == nullptr) return;
    result->v_int64 =
        nvgemm::TryLaunch(entry.kernel, nvgemm::OperandsOf(arguments, entry.kernel->spec));
  });
}

NVGEMM_EXPORT int __tvm_ffi_register_table(void*, const TVMFFIAny* values, int32_t count,
                                           TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("register_table", values, count, 2, INT32_MAX);
    nvgemm::Return(result, nvgemm::RegisterDispatchTable(nvgemm::TableOf(arguments)));
  });
}

NVGEMM_EXPORT int __tvm_ffi_set_in_table(void*, const TVMFFIAny* values, int32_t count,
                                         TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("set_in_table", values, count, 3);
    const int64_t kernel = arguments.Integer(2, "kernel");
    nvgemm::DispatchTableOfHandle(arguments.Integer(0, "table"))
        ->Set(arguments.Integer(1, "slot"),
              kernel == nvgemm::DispatchTable::kAten ? nullptr : nvgemm::KernelOfHandle(kernel));
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
    const Arguments arguments("register_kernel", values, count, nvgemm::kFirstParameter,
                              INT32_MAX);
    nvgemm::Return(result, nvgemm::RegisterKernel(nvgemm::SpecOf(arguments))->handle);
  });
}

NVGEMM_EXPORT int __tvm_ffi_clusters_at_once(void*, const TVMFFIAny* values, int32_t count,
                                             TVMFFIAny* result) {
  return Guarded([&] {
    const Arguments arguments("clusters_at_once", values, count, 2);
    const int device = static_cast<int>(arguments.Integer(0, "device"));
    const int size = static_cast<int>(arguments.Integer(1, "cluster_size"));
    nvgemm::cuda::RefuseForkedChild();
    const nvgemm::cuda::DeviceGuard guard(device);
    nvgemm::Return(result, nvgemm::cuda::ClustersAtOnce(device, size));
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

NVGEMM_EXPORT int __tvm_ffi_set_reporter(void*, const TVMFFIAny* values, int32_t count,
                                         TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("set_reporter", values, count, 1);
    nvgemm::SetReporter(arguments.FunctionOrNone(0, "reporter"));
  });
}

NVGEMM_EXPORT int __tvm_ffi_set_library_keeps_lock(void*, const TVMFFIAny* values, int32_t count,
                                                   TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("set_library_keeps_lock", values, count, 1);
    nvgemm::SetLibraryKeepsLock(arguments.Bool(0, "keeps"));
  });
}

NVGEMM_EXPORT int __tvm_ffi_register_torch_ops(void*, const TVMFFIAny* values, int32_t count,
                                               TVMFFIAny*) {
  return Guarded([&] {
    const Arguments arguments("register_torch_ops", values, count, 0);
    nvgemm::RegisterTorchOps();
  });
}

// Looked up by the C++ code that torch generates through cpp.py.
NVGEMM_EXPORT int64_t nvgemm_aot_operators_abi() { return nvgemm::RegisteredAbi(); }

NVGEMM_EXPORT int __tvm_ffi_abi(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  nvgemm::Return(result, nvgemm::kAbi);
  return 0;
}
