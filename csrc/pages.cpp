// See pages.h.
#include "pages.h"

#include <cstring>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tokenmill {
namespace {

constexpr size_t kLarge = size_t{2} << 20;
constexpr size_t kShared = size_t{64} << 20;  // reserved at a time; untouched pages take no memory
constexpr size_t kOwn = size_t{32} << 20;     // allocations from this size on have their own pages
constexpr size_t kSmall = size_t{16} << 10;   // smaller allocations use ordinary memory
constexpr std::align_val_t kLine{64};         // a cache line

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::shared_ptr<uint8_t[]> own_pages(size_t bytes) {
  auto* memory = static_cast<uint8_t*>(take_large_pages(bytes));
  if (memory == nullptr) throw std::bad_alloc();
  return {memory, give_large_pages};
}

// Allocates parts of one piece of memory until it is full; the piece lives as long as any of its parts.
class SharedPages {
 public:
  std::shared_ptr<uint8_t[]> take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<uint8_t[]> pages = pages_.lock();
    if (!pages || used_ + bytes > kShared) {
      pages_ = pages = own_pages(kShared);
      used_ = 0;
    }
    uint8_t* part = pages.get() + used_;
    used_ += round_up(bytes, 64);
    return {std::move(pages), part};
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<uint8_t[]> pages_;
  size_t used_ = 0;
};

}  // namespace

void* take_large_pages(size_t bytes) {
  const size_t whole = round_up(bytes, kLarge);
  void* memory = ::operator new(whole, std::align_val_t(kLarge), std::nothrow);
#if defined(__linux__)
  if (memory != nullptr) madvise(memory, whole, MADV_HUGEPAGE);
#endif
  return memory;
}

void give_large_pages(void* memory) { ::operator delete(memory, std::align_val_t(kLarge)); }

std::shared_ptr<uint8_t[]> unset_pages(size_t bytes) {
  static SharedPages shared;
  if (bytes >= kOwn) return own_pages(bytes);
  if (bytes >= kSmall) return shared.take(bytes);
  auto* memory = static_cast<uint8_t*>(::operator new[](bytes, kLine));
  return {memory, [](uint8_t* p) { ::operator delete[](p, kLine); }};
}

std::shared_ptr<uint8_t[]> allocate_pages(size_t bytes) {
  std::shared_ptr<uint8_t[]> memory = unset_pages(bytes);
  std::memset(memory.get(), 0, bytes);
  return memory;
}

}  // namespace tokenmill
