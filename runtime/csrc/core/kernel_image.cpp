#include "core/kernel_image.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "driver/dynamic_loading.h"
#include "core/failure.h"

namespace nvgemm {
namespace {

[[noreturn]] void FailToLoad(std::string_view name, std::string_view reason) {
  throw Failure(kNoKernelError, Text(name, " cannot be loaded from memory: ", reason));
}

// An in-memory file.
class MemoryFile {
 public:
  MemoryFile(std::string_view content, std::string_view name)
      : descriptor_(memfd_create("nvgemm-kernel", MFD_CLOEXEC)) {
    if (descriptor_ < 0) FailToLoad(name, std::strerror(errno));
    while (!content.empty()) {
      const ssize_t written = write(descriptor_, content.data(), content.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        const int error = written < 0 ? errno : ENOSPC;
        close(descriptor_);
        FailToLoad(name, std::strerror(error));
      }
      content.remove_prefix(static_cast<size_t>(written));
    }
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // Returns a new path. The loader considers equal paths the same library, and descriptors are
  // reused: without a unique path, it would silently return an earlier kernel. So each path spells
  // the same directory differently, by the bits of a number.
  std::string UniquePath(uint64_t number) const {
    std::string path = "/proc/self/";
    do {
      path += (number & 1) != 0 ? ".//" : "./";
    } while ((number >>= 1) != 0);
    return path + Text("fd/", descriptor_);
  }

 private:
  const int descriptor_;
};

// Renames a library in the loader's list to a name that no file can have. Otherwise the loader
// keeps the descriptor's path, which is closed and soon reused: a program that opens all library
// files to print a stack would read another file, block on a pipe, or be killed by mapping an empty
// file. Writing l_name is undocumented; it works with glibc 2.36. If it fails, the kernel runs
// anyway.
void HidePath(void* library, uint64_t number) {
  link_map* entry = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &entry) != 0) return;
  char* const no_file = strdup(Text("/dev/null/nvgemm-kernel-", number).c_str());
  if (no_file == nullptr) return;
  // The old name is not freed: another thread may be reading it.
  __atomic_store_n(&entry->l_name, no_file, __ATOMIC_RELEASE);
}

}  // namespace

uintptr_t OpenKernelImage(std::string_view image, const std::string& symbol,
                          std::string_view name) {
  static std::atomic<uint64_t> images{0};
  const MemoryFile file(image, name);
  const uint64_t number = images.fetch_add(1, std::memory_order_relaxed);
  void* const library = dlopen(file.UniquePath(number).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) FailToLoad(name, dlerror());
  void* const function = dlsym(library, symbol.c_str());
  if (function == nullptr) {
    dlclose(library);
    throw Failure(kNoKernelError,
                  Text(name, " does not export ", symbol, "; build the bundle again"));
  }
  HidePath(library, number);
  return reinterpret_cast<uintptr_t>(function);
}

}  // namespace nvgemm
