// See pool.h. The memory order that matters: a worker that announces its sleep and the caller that publishes work each
// write one word and then read the other's, both sequentially consistent, so at least one of them sees the other.
#include "pool.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace tokenmill {
namespace {

constexpr int kBits = 20;  // of a piece number
constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
constexpr int kWorkerSpins = 1000;  // about 40 microseconds
constexpr int kCallerSpins = 500;

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { worker(t); });
}

Pool::~Pool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void Pool::publish(int pieces, Call call, const void* context) {
  call_ = call;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  ticket_.store(static_cast<uint64_t>(epoch) << (2 * kBits) | static_cast<uint64_t>(pieces) << kBits);
  epoch_.store(epoch);
  if (sleepers_.load() > 0) epoch_.notify_all();
}

bool Pool::claim(int& piece) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & kMask) < ((ticket >> kBits) & kMask)) {
    if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
      piece = static_cast<int>(ticket & kMask);
      return true;
    }
  }
  return false;
}

bool Pool::work_one(int thread) {
  int piece;
  if (!claim(piece)) return false;
  const uint32_t count = static_cast<uint32_t>((ticket_.load(std::memory_order_relaxed) >> kBits) & kMask);
  call_(context_, piece, thread);
  if (done_.fetch_add(1) + 1 == count && caller_sleeps_.load()) done_.notify_all();
  return true;
}

void Pool::work_until_done(int pieces) {
  while (work_one(0)) {}
  const uint32_t all = static_cast<uint32_t>(pieces);
  for (int spin = 0; spin < kCallerSpins; ++spin) {
    if (done_.load(std::memory_order_acquire) == all) return;
    relax();
  }
  caller_sleeps_.store(true);
  for (uint32_t now = done_.load(); now != all; now = done_.load()) done_.wait(now);
  caller_sleeps_.store(false);
}

void Pool::wait_for_news(uint32_t seen) {
  for (int spin = 0; spin < kWorkerSpins; ++spin) {
    if (epoch_.load(std::memory_order_acquire) != seen) return;
    relax();
  }
  sleepers_.fetch_add(1);
  epoch_.wait(seen);
  sleepers_.fetch_sub(1);
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    seen = epoch_.load(std::memory_order_acquire);
    while (work_one(thread)) {}
    if (!stop_.load(std::memory_order_relaxed)) wait_for_news(seen);
  }
}

}  // namespace tokenmill
