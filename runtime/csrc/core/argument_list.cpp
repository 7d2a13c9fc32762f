#include "core/argument_list.h"

#include <cstdint>
#include <cstring>

#include "driver/cuda_driver.h"
#include "core/failure.h"
#include "ffi/ffi_error.h"

namespace nvgemm {
namespace {

// Returns TVM-FFI's array constructor; never released.
TVMFFIObjectHandle ArrayConstructor() {
  static const TVMFFIObjectHandle constructor = [] {
    constexpr char kName[] = "ffi.Array";
    const TVMFFIByteArray name{kName, sizeof(kName) - 1};
    TVMFFIObjectHandle function = nullptr;
    if (TVMFFIFunctionGetGlobal(&name, &function) != 0) throw TakeRaisedError(kName);
    if (function == nullptr) throw Failure(kRuntimeError, "TVM-FFI has no function ffi.Array");
    return function;
  }();
  return constructor;
}

// Builds the array (m, n, k, batch); k counts values.
TVMFFIObjectHandle MakeMnkl(const KernelSpec& spec, const CheckedCall& call) {
  const TensorView& a = call[Role::kA];
  const TensorView& out = call[Role::kOut];
  const int rank = spec.out_rank();
  const int64_t n = spec.ProductColumns(out.shape[rank - 1]);
  const int64_t extents[] = {out.shape[rank - 2], n,
                             a.shape[spec.a_rank() - 1] * spec.a_dtype.lanes, rank == 3 ? out.shape[0] : 1};
  TVMFFIAny values[4] = {};
  for (int i = 0; i < 4; ++i) {
    values[i].type_index = kTVMFFIInt;
    values[i].v_int64 = extents[i];
  }
  TVMFFIAny array{};
  array.type_index = kTVMFFINone;
  if (TVMFFIFunctionCall(ArrayConstructor(), values, 4, &array) != 0) {
    throw TakeRaisedError("making the array of a kernel's extents");
  }
  return array.v_obj;
}

// torch reuses the workspace in the order of its own current stream.
void CheckStream(const KernelSpec& spec, int64_t bytes, DLDevice device, void* stream) {
  if (device.device_type != kDLCUDA || CurrentCudaStream(device.device_id) == stream) return;
  throw Failure(kValueError, Text("kernel ", ShortId(spec.id), " needs a workspace of ", bytes,
                                  " bytes, and its launch is not on torch's current stream; "
                                  "launch it under torch.cuda.stream()"));
}

// Wrong counters, after a killed launch or from reused memory, would make the kernel wait forever
// or accumulate onto stale data. So every launch zeroes the prefix.
void FillWithZeros(DLDevice device, void* data, int64_t bytes, void* stream) {
  if (bytes == 0) return;
  if (device.device_type == kDLCUDA) return cuda::FillBytesWithZeros(data, bytes, stream);
  std::memset(data, 0, static_cast<size_t>(bytes));
}

}  // namespace

WorkspaceBytes BytesOf(const KernelSpec& spec, const CheckedCall& call) {
  const WorkspaceSize& size = spec.workspace;
  if (size.tile_m == 0) return {0, size.fixed_bytes};
  const TensorView& out = call[Role::kOut];
  const int rank = spec.out_rank();
  const int64_t n = call[Role::kB].shape[spec.b_rank() - 1];  // product columns
  const auto count = [](int64_t extent, int64_t tile, int64_t multiple) {
    const int64_t tiles = (extent + tile - 1) / tile;
    return (tiles + multiple - 1) / multiple * multiple;
  };
  constexpr int64_t kRounded = 128;  // ZEROED_MULTIPLE_BYTES in bundle/workspace.py
  int64_t tiles = 0;
  int64_t zeroed = 0;
  int64_t scratch = 0;
  int64_t total = 0;
  const bool overflows =
      __builtin_mul_overflow(count(out.shape[rank - 2], size.tile_m, size.multiple_m),
                             count(n, size.tile_n, size.multiple_n), &tiles) ||
      __builtin_mul_overflow(tiles, rank == 3 ? out.shape[0] : 1, &tiles) ||
      __builtin_mul_overflow(tiles, size.zeroed_per_tile, &zeroed) ||
      __builtin_add_overflow(zeroed, size.zeroed_once + kRounded - 1, &zeroed) ||
      __builtin_mul_overflow(tiles, size.scratch_per_tile, &scratch) ||
      __builtin_add_overflow(zeroed / kRounded * kRounded, scratch, &total);
  if (overflows) {
    throw Failure(kValueError, Text("kernel ", ShortId(spec.id), " needs a workspace of more than ",
                                    INT64_MAX, " bytes for this result"));
  }
  return {zeroed / kRounded * kRounded, total};
}

ArgumentList::ArgumentList(const KernelSpec& spec, CheckedCall* call, void* stream) {
  const DLDevice device = (*call)[Role::kA].tensor.device;
  if (spec.workspace.is_needed()) {
    const WorkspaceBytes bytes = BytesOf(spec, *call);
    CheckStream(spec, bytes.total, device, stream);
    workspace_.emplace(AllocateBytes(device, bytes.total));
    workspace_view_ = ViewOf(*workspace_);
    FillWithZeros(device, workspace_view_.data, bytes.zeroed, stream);
  }
  for (const Parameter& parameter : spec.parameters) {
    TVMFFIAny& argument = arguments_[size_++];
    switch (parameter.kind) {
      case Parameter::Kind::kTensor:
        argument.type_index = kTVMFFIDLTensorPtr;
        argument.v_ptr = &(*call)[parameter.role].tensor;
        break;
      case Parameter::Kind::kPointer:
        argument.type_index = kTVMFFIOpaquePtr;
        argument.v_ptr = (*call)[parameter.role].data();
        break;
      case Parameter::Kind::kMnkl:
        mnkl_ = MakeMnkl(spec, *call);
        argument.type_index = kTVMFFIArray;
        argument.v_obj = static_cast<TVMFFIObject*>(mnkl_);
        break;
      case Parameter::Kind::kWorkspace:
        argument.type_index = kTVMFFIDLTensorPtr;
        argument.v_ptr = &workspace_view_;
        break;
      case Parameter::Kind::kClusters:
        argument.type_index = kTVMFFIInt;
        argument.v_int64 = device.device_type == kDLCUDA
                               ? cuda::ClustersAtOnce(device.device_id, spec.cluster_size)
                               : 1;
        break;
      case Parameter::Kind::kStream:
        argument.type_index = kTVMFFIOpaquePtr;
        argument.v_ptr = stream;
        break;
    }
  }
}

ArgumentList::~ArgumentList() {
  if (mnkl_ != nullptr) TVMFFIObjectDecRef(mnkl_);
}

}  // namespace nvgemm
