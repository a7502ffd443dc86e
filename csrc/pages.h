// Memory on huge pages, where the system supports them. A core's TLB covers a few thousand pages; with 4 KB pages that is less
// than a step's rows and a layer's weights, and hardware prefetching stops at every page border.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace tokenmill {

// Allocates uninitialised memory, aligned to 64 bytes. Allocations of up to 32 MB share pages with earlier ones: an expert of
// 4.7 MB on its own pages would take 6.
std::shared_ptr<uint8_t[]> unset_pages(size_t bytes);
std::shared_ptr<uint8_t[]> allocate_pages(size_t bytes);  // zeroed

void* take_large_pages(size_t bytes);  // whole pages, which the caller frees; null if there is no memory
void give_large_pages(void* memory);

// An allocator for vectors that grow to megabytes; small ones use ordinary memory.
template <class T>
struct PageAllocator {
  using value_type = T;
  PageAllocator() = default;
  template <class U>
  PageAllocator(const PageAllocator<U>&) {}

  static bool is_large(size_t count) { return count * sizeof(T) >= (size_t{1} << 20); }
  T* allocate(size_t count) {
    if (!is_large(count)) return std::allocator<T>().allocate(count);
    if (void* memory = take_large_pages(count * sizeof(T))) return static_cast<T*>(memory);
    throw std::bad_alloc();
  }
  void deallocate(T* memory, size_t count) {
    if (is_large(count)) give_large_pages(memory);
    else std::allocator<T>().deallocate(memory, count);
  }
  friend bool operator==(const PageAllocator&, const PageAllocator&) { return true; }
};

template <class T>
using PageVector = std::vector<T, PageAllocator<T>>;

// For buffers that are reused between steps.
template <class Buffer>
void grow(Buffer& v, size_t size) {
  if (v.size() < size) v.resize(size);
}

}  // namespace tokenmill
