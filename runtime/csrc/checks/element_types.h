// Kernel element types, by torch and DLPack numbers.

#ifndef NVGEMM_RUNTIME_CSRC_ELEMENT_TYPES_H_
#define NVGEMM_RUNTIME_CSRC_ELEMENT_TYPES_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>

#include "core/gemm.h"

namespace nvgemm {

struct ElementType {
  const char* torch_name;
  int32_t torch_number;  // in c10::ScalarType
  DLDataType dlpack;
};

// Rows from nvgemm_runtime/gemm/types.py; element_types.py generates them at build time.
inline constexpr ElementType kElementTypes[] = {
#include "element_types.inc"
};

// Returns null for a dtype that no kernel has.
inline const ElementType* FindElementType(DLDataType dtype) {
  for (const ElementType& row : kElementTypes) {
    if (SameDType(row.dlpack, dtype)) return &row;
  }
  return nullptr;
}

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_ELEMENT_TYPES_H_
