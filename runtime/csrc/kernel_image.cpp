#include "kernel_image.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "dynamic_loading.h"
#include "failure.h"

namespace nvgemm {
namespace {

constexpr unsigned char kElf64LittleEndian[] = {0x7f, 'E', 'L', 'F', ELFCLASS64, ELFDATA2LSB};

// Refuses an image whose segments reach past its end: reading those would kill the process. The
// loader itself detects other damage.
void CheckSegments(std::string_view image, std::string_view name) {
  Elf64_Ehdr header;
  if (image.size() < sizeof header ||
      std::memcmp(image.data(), kElf64LittleEndian, sizeof kElf64LittleEndian) != 0) {
    throw Failure(kNoKernelError,
                  Text(name, " is no 64-bit ELF image (", image.size(), " bytes)"));
  }
  std::memcpy(&header, image.data(), sizeof header);
  uint64_t end = 0;
  const uint64_t table_bytes = header.e_phnum * uint64_t{sizeof(Elf64_Phdr)};
  if (__builtin_add_overflow(header.e_phoff, table_bytes, &end)) end = UINT64_MAX;
  if (header.e_phentsize == sizeof(Elf64_Phdr) && end <= image.size()) {
    for (uint64_t at = header.e_phoff; at < header.e_phoff + table_bytes; at += sizeof(Elf64_Phdr)) {
      Elf64_Phdr segment;
      std::memcpy(&segment, image.data() + at, sizeof segment);
      uint64_t segment_end = 0;
      if (__builtin_add_overflow(segment.p_offset, segment.p_filesz, &segment_end)) {
        segment_end = UINT64_MAX;
      }
      if (segment_end > end) end = segment_end;
    }
  }
  if (end > image.size()) {
    throw Failure(kNoKernelError, Text(name, " is cut off: ", image.size(),
                                       " bytes, its segments need ", end));
  }
}

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

  // A new path. The loader takes equal paths for the same library, and descriptors are reused:
  // without a path of its own, a kernel would silently be one that was loaded before. So each path
  // spells the same directory differently, by the bits of a number.
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
// keeps the path of the descriptor, which is closed and soon reused: a program that opens the files
// of all libraries to print a stack would read another file, wait for it if it is a pipe, or be
// killed by mapping it if it is empty. Writing l_name is not documented; it works with glibc 2.36. Where it
// fails the kernel runs all the same.
void TakeAwayPath(void* library, uint64_t number) {
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
  CheckSegments(image, name);
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
  TakeAwayPath(library, number);
  return reinterpret_cast<uintptr_t>(function);
}

}  // namespace nvgemm
