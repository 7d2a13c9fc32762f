// Errors and results from TVM-FFI functions that this library calls.

#ifndef NVGEMM_RUNTIME_CSRC_FFI_ERROR_H_
#define NVGEMM_RUNTIME_CSRC_FFI_ERROR_H_

#include <tvm/ffi/c_api.h>

#include <string_view>

#include "core/failure.h"

namespace nvgemm {

// Returns the error that a failed function left in this thread, as a Failure that names the
// function. A function may also fail without an error.
inline Failure TakeRaisedError(std::string_view what) {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == nullptr) {
    return Failure(kRuntimeError, Text(what, " failed without an error message"));
  }
  const TVMFFIErrorCell* cell = TVMFFIErrorGetCellPtr(error);
  Failure failure(std::string(cell->kind.data, cell->kind.size),
                  Text(what, ": ", std::string_view(cell->message.data, cell->message.size)));
  TVMFFIObjectDecRef(error);
  return failure;
}

// Releases a function's result.
inline void ReleaseResult(const TVMFFIAny& result) {
  if (result.type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(result.v_obj);
}

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_FFI_ERROR_H_
