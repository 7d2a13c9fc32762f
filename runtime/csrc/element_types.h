// The element types that kernels have, as torch and DLPack know them.

#ifndef NVGEMM_RUNTIME_CSRC_ELEMENT_TYPES_H_
#define NVGEMM_RUNTIME_CSRC_ELEMENT_TYPES_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>

#include "gemm.h"

namespace nvgemm {

struct ElementType {
  const char* torch_name;
  int32_t torch_number;  // in c10::ScalarType
  DLDataType dlpack;
};

// Rows of nvgemm_runtime/gemm/types.py, written by element_types.py when this is built.
inline constexpr ElementType kElementTypes[] = {
#include "element_types.inc"
};

// Null for a dtype that no kernel has.
inline const ElementType* FindElementType(DLDataType dtype) {
  for (const ElementType& row : kElementTypes) {
    if (SameDType(row.dlpack, dtype)) return &row;
  }
  return nullptr;
}

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_ELEMENT_TYPES_H_
