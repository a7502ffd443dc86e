// See pool.h. On memory order: a worker that announces its sleep and the caller that publishes work each write one word and
// then read the other's, both sequentially consistent, so at least one of them sees the other.
#include "pool.h"

#include <stdexcept>

#include "spin.h"

namespace tokenmill {
namespace {

constexpr int kBits = 20;  // of a piece number
constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
constexpr int kWorkerSpins = 1000;  // about 40 microseconds
constexpr int kCallerSpins = 500;
constexpr std::chrono::microseconds kLook{20};   // a thread whose CPU clock does not advance in this time is preempted
constexpr std::chrono::microseconds kNap{1000};  // between two checks

// Whether a thread with work is preempted; `ready` ends the check early.
template <class Ready>
bool stands_still(const ThreadState& state, const Ready& ready) {
  const int64_t before = state.works() ? nanoseconds_on(state.clock()) : -1;
  if (before < 0) return false;
  const auto until = std::chrono::steady_clock::now() + kLook;
  while (std::chrono::steady_clock::now() < until)
    if (spin_until(10, ready)) return false;
  return nanoseconds_on(state.clock()) == before;
}

}  // namespace

void ThreadState::begin() {
  thread_ = this_thread();
  clock_.store(this_threads_clock(), std::memory_order_relaxed);
  core_.store(current_core(), std::memory_order_relaxed);
  hold_.store(Hold::Pieces, std::memory_order_release);
}

bool ThreadState::leave() {
  while (true) {
    for (const Hold held : {Hold::Pieces, Hold::Pulled}) {
      Hold now = held;
      if (hold_.compare_exchange_strong(now, Hold::Nothing)) return held == Hold::Pulled;
    }
    std::this_thread::yield();  // another thread is in pull_to()
  }
}

bool ThreadState::pull_to(int core) {
  Hold now = hold_.load(std::memory_order_relaxed);
  if (now == Hold::Nothing || now == Hold::BeingPulled) return false;
  if (!hold_.compare_exchange_strong(now, Hold::BeingPulled)) return false;
  const bool moved = move_thread(thread_, core);
  hold_.store(moved ? Hold::Pulled : now, std::memory_order_release);
  return moved;
}

Pool::Pool(int threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
  states_ = std::vector<ThreadState>(static_cast<size_t>(threads));
  try {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { worker(t); });
  } catch (...) {  // the system refuses more threads
    dismiss();
    throw;
  }
}

Pool::~Pool() { dismiss(); }

void Pool::dismiss() {
  stop_.store(true);
  epoch_.fetch_add(1);
  wake_all(epoch_);
  for (std::thread& thread : workers_) thread.join();
}

void Pool::publish(int pieces, Call call, const void* context) {
  if (static_cast<uint64_t>(pieces) > kMask) throw std::invalid_argument("too many pieces for one phase");
  call_ = call;
  context_ = context;
  states_[0].begin();
  done_.store(0, std::memory_order_relaxed);
  pieces_.store(static_cast<uint32_t>(pieces), std::memory_order_relaxed);
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  ticket_.store(static_cast<uint64_t>(epoch) << (2 * kBits) | static_cast<uint64_t>(pieces) << kBits);
  epoch_.store(epoch);
  if (sleepers_.load() > 0) wake_all(epoch_);
}

bool Pool::claim(int thread, int& piece) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & kMask) < ((ticket >> kBits) & kMask)) {
    const bool next = takes_next(thread);
    const uint64_t left = next ? ticket + 1 : ticket - (uint64_t{1} << kBits);
    if (ticket_.compare_exchange_weak(ticket, left, std::memory_order_acq_rel)) {
      piece = static_cast<int>(next ? ticket & kMask : (left >> kBits) & kMask);
      return true;
    }
  }
  return false;
}

bool Pool::work_one(int thread) {
  int piece;
  if (!claim(thread, piece)) return false;
  const uint32_t count = pieces_.load(std::memory_order_relaxed);  // the phase lasts until this piece is done
  call_(context_, piece, thread);
  if (done_.fetch_add(1) + 1 == count && caller_sleeps_.load()) wake_all(done_);
  return true;
}

void Pool::work_until_done(uint32_t pieces) {
  while (work_one(0)) {}
  if (!spin_until(kCallerSpins, [&] { return done_.load(std::memory_order_acquire) == pieces; }))
    wait_for_workers(pieces);
  states_[0].leave();
}

void Pool::wait_for_workers(uint32_t pieces) {
  const auto ready = [&] { return done_.load(std::memory_order_acquire) == pieces; };
  while (!ready()) {
    for (size_t t = 1; t < states_.size(); ++t)
      if (stands_still(states_[t], ready) && states_[t].pull_to(current_core()))
        rescues_.fetch_add(1, std::memory_order_relaxed);
    caller_sleeps_.store(true);
    const uint32_t now = done_.load();
    if (now != pieces) sleep_while(done_, now, kNap);
    caller_sleeps_.store(false);
  }
}

// Waits for a new phase, or for a reason to look for pieces again.
void Pool::wait_for_news(uint32_t seen) {
  const auto news = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
  if (spin_until(kWorkerSpins, news)) return;
  const ThreadState& caller = states_[0];
  if (!caller_sleeps_.load() && stands_still(caller, news) && take_callers_place()) return;
  sleepers_.fetch_add(1);
  sleep_while(epoch_, seen, caller.works() ? kNap : kForever);
  sleepers_.fetch_sub(1);
}

bool Pool::take_callers_place() {
  const int here = current_core(), there = states_[0].core();
  if (!states_[0].pull_to(here)) return false;
  rescues_.fetch_add(1, std::memory_order_relaxed);
  return move_thread(this_thread(), there != here ? there : core_beside(here));
}

void Pool::return_from_rescue(const ThreadState& state) {
  const int here = current_core(), there = state.core();
  move_thread(this_thread(), there != here ? there : core_beside(here));
}

void Pool::worker(int thread) {
  ThreadState& state = states_[static_cast<size_t>(thread)];
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint32_t seen = epoch_.load(std::memory_order_acquire);
    state.begin();
    while (work_one(thread)) {}
    if (state.leave())
      return_from_rescue(state);
    else if (!stop_.load(std::memory_order_relaxed))
      wait_for_news(seen);
  }
}

}  // namespace tokenmill
