// Opens a kernel's payload, an ELF shared object in memory, without a file.

#ifndef NVGEMM_RUNTIME_CSRC_KERNEL_IMAGE_H_
#define NVGEMM_RUNTIME_CSRC_KERNEL_IMAGE_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace nvgemm {

// Loads the image for the life of the process, whatever was loaded before, and returns the
// address of the function that it exports as `symbol`. `name` is what messages call it. Thread-safe.
// The image must be whole, as its digest says: the loader reads what its headers name. Throws Failure
// if it cannot be loaded, or does not export the function; nothing of it stays loaded then.
uintptr_t OpenKernelImage(std::string_view image, const std::string& symbol,
                          std::string_view name);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_KERNEL_IMAGE_H_
