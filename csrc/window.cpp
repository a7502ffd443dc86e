// See window.h.
#include "window.h"

#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "spin.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tokenmill {
namespace {

constexpr int kSpins = 1000;  // about 40 microseconds
constexpr long kNapNs = 10'000'000;

static_assert(std::atomic<uint32_t>::is_always_lock_free, "words are shared between processes");

// Sleeps briefly while `word` has `value`. Unlike in the pool, the threads may belong to different processes.
void nap_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  const timespec limit{0, kNapNs};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::yield();
#endif
}

void wake_sleepers(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace

size_t Window::bytes_for(int size, size_t room_bytes) {
  return sizeof(Header) + 2 * static_cast<size_t>(size) * room_bytes;
}

Window::Window(uint8_t* memory, std::shared_ptr<void> keep, int rank, int size, size_t room_bytes)
    : memory_(memory), keep_(std::move(keep)), rank_(rank), size_(size), room_bytes_(room_bytes) {
  if (size < 2 || rank < 0 || rank >= size) throw std::invalid_argument("a window is for two ranks or more");
  if (room_bytes == 0 || room_bytes % 64 != 0) throw std::invalid_argument("rooms are multiples of 64 bytes");
}

void Window::meet() {
  Header& shared = header();
  const uint32_t round = shared.round.load(std::memory_order_acquire);
  require_all_there();
  if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < static_cast<uint32_t>(size_)) return wait_for_others(round);
  shared.arrived.store(0, std::memory_order_relaxed);
  shared.round.store(round + 1);
  if (shared.sleepers.load() > 0) wake_sleepers(shared.round);
}

void Window::wait_for_others(uint32_t round) {
  Header& shared = header();
  const auto all_came = [&] { return shared.round.load(std::memory_order_acquire) != round; };
  if (spin_until(kSpins, all_came)) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s_);
  while (!all_came()) {
    require_all_there();
    if (std::chrono::steady_clock::now() > until) {
      abort();
      throw PeersGone("another rank does not come to where all meet");
    }
    shared.sleepers.fetch_add(1);
    if (!all_came()) nap_while(shared.round, round);
    shared.sleepers.fetch_sub(1);
  }
}

void Window::require_all_there() const {
  if (is_aborted()) throw PeersGone("another rank has ended");
}

void Window::abort() {
  header().aborted.store(1);
  wake_sleepers(header().round);
}

std::shared_ptr<void> window_memory(int size, size_t room_bytes) {
  const size_t bytes = (Window::bytes_for(size, room_bytes) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  return {memory, std::free};
}

std::shared_ptr<void> mapped_window(int descriptor, int size, size_t room_bytes) {
#if defined(__linux__)
  const size_t bytes = Window::bytes_for(size, room_bytes);
  struct stat found;
  if (fstat(descriptor, &found) != 0 || static_cast<size_t>(found.st_size) < bytes)
    throw std::invalid_argument("the memory file is too small for the window");
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return {memory, [bytes](void* mapped) { munmap(mapped, bytes); }};
#else
  (void)descriptor, (void)size, (void)room_bytes;
  throw std::runtime_error("ranks in processes need Linux");
#endif
}

}  // namespace tokenmill
