// Memory on large pages, where the system has them. A core knows the places of some thousand pages at a time; of 4 KB each
// that is less than a step's rows and the weights of a layer, and fetching ahead ends at every border.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace tokenmill {

// At a multiple of 64 bytes, not set to anything. Parts of up to 32 MB share pages with those asked for before them: an expert
// of 4.7 MB on pages of its own would take 6.
std::shared_ptr<uint8_t[]> unset_pages(size_t bytes);
std::shared_ptr<uint8_t[]> allocate_pages(size_t bytes);  // zeroed

void* take_large_pages(size_t bytes);  // whole ones, of the caller's own; null where there is no memory
void give_large_pages(void* memory);

// For vectors that grow to megabytes; small ones lie where all others do.
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

// For buffers that are kept from step to step.
template <class Buffer>
void grow(Buffer& v, size_t size) {
  if (v.size() < size) v.resize(size);
}

}  // namespace tokenmill
