// Opens a kernel's payload, an ELF shared object in memory, without a file.

#ifndef NVGEMM_RUNTIME_CSRC_KERNEL_IMAGE_H_
#define NVGEMM_RUNTIME_CSRC_KERNEL_IMAGE_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace nvgemm {

// Loads the image for the life of the process, independently of earlier images, and returns the
// address of its exported function `symbol`. `name` is its name in messages. The image must be
// complete, as its digest guarantees: the loader reads what its headers name. Thread-safe. Throws
// Failure if it cannot be loaded or does not export the function; then nothing stays loaded.
uintptr_t OpenKernelImage(std::string_view image, const std::string& symbol,
                          std::string_view name);

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_KERNEL_IMAGE_H_
