// Append-only object table: found by handle without a lock, never removed.

#ifndef NVGEMM_RUNTIME_CSRC_APPEND_ONLY_H_
#define NVGEMM_RUNTIME_CSRC_APPEND_ONLY_H_

#include <atomic>
#include <cstdint>

namespace nvgemm {

// Handles count up from 0. Blocks never move, so a reader needs no lock; two levels keep an empty
// table at 8 KiB and a full one at a million objects.
template <typename T>
class AppendOnly {
 public:
  static constexpr int64_t kMaxSize = 1024 * 1024;

  // Returns the object for a handle; null if there is none.
  T* At(int64_t handle) const {
    if (handle < 0 || handle >= kMaxSize) return nullptr;
    const Slot* block = blocks_[handle / kBlockSize].load(std::memory_order_acquire);
    if (block == nullptr) return nullptr;
    return block[handle % kBlockSize].load(std::memory_order_acquire);
  }

  // Returns the next handle. Only for the appending thread.
  int64_t size() const { return size_; }

  // Appends an object under the next handle, which must be below kMaxSize. One thread at a time.
  void Append(T* object) {
    Slot* block = blocks_[size_ / kBlockSize].load(std::memory_order_relaxed);
    if (block == nullptr) {
      block = new Slot[kBlockSize]();
      blocks_[size_ / kBlockSize].store(block, std::memory_order_release);
    }
    block[size_ % kBlockSize].store(object, std::memory_order_release);
    ++size_;
  }

 private:
  using Slot = std::atomic<T*>;
  static constexpr int64_t kBlockSize = 1024;

  int64_t size_ = 0;
  std::atomic<Slot*> blocks_[kMaxSize / kBlockSize] = {};
};

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_APPEND_ONLY_H_
