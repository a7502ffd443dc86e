// A thread pool for machines that are shared with other processes. Work is cut into small pieces that any free thread claims,
// so a core that is lost to another process delays one piece and not a fixed share of the work. An idle thread spins for some
// microseconds and then sleeps in the kernel, which frees its core for the thread that was preempted.
//
//   ticket = epoch | end | next      one atomic word, so a claim can't mix up phases; pieces [next, end) are left
//
// Half of the threads claim the next piece, the others the last one, until they meet. So a thread mostly reads rows that it
// wrote in the previous phase, which are still in its caches.
//
// A thread that is preempted in the middle of a piece would delay all others by a whole time slice of the other process
// (milliseconds). A waiting thread detects this by the other's CPU clock and moves that thread to its own core (a "rescue"):
//
//   the caller waits for a worker:  it moves the worker to its core and sleeps; the worker finishes its piece and returns
//                                   to the busy core, where it waits without work until it is scheduled again
//   a worker waits for the caller:  it moves the caller to its core and moves itself to the busy core
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "threads.h"

namespace tokenmill {

// A thread's state for the other threads: whether it may hold pieces of the current phase, and on which core it started.
class alignas(64) ThreadState {
 public:
  void begin();  // before its thread claims
  bool leave();  // afterwards; returns whether it was moved to another core meanwhile
  bool works() const { return hold_.load(std::memory_order_relaxed) != Hold::Nothing; }
  int clock() const { return clock_.load(std::memory_order_relaxed); }
  int core() const { return core_.load(std::memory_order_relaxed); }
  bool pull_to(int core);  // called by another thread; false if its work has ended, or it may not run on that core

 private:
  enum class Hold : int { Nothing, Pieces, BeingPulled, Pulled };
  std::atomic<Hold> hold_{Hold::Nothing};
  std::atomic<int> core_{-1}, clock_{-1};
  ThreadHandle thread_{};  // valid while it works: leave() waits for a thread that is in pull_to()
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  uint64_t rescues() const { return rescues_.load(std::memory_order_relaxed); }

  static bool takes_next(int thread) { return thread % 2 == 0; }  // others claim from the last piece to the first
  // The piece that a thread claims after this one if all threads are equally fast; it may not exist.
  int piece_after(int piece, int thread) const {
    return takes_next(thread) ? piece + (threads() + 1) / 2 : piece - threads() / 2;
  }
  // Calls body(piece, thread) for every piece in [0, pieces); the calling thread works too, and returns when all are done.
  template <class Body>
  void run(int pieces, const Body& body) {
    if (pieces <= 1 || workers_.empty()) {
      for (int i = 0; i < pieces; ++i) body(i, 0);
      return;
    }
    publish(pieces, [](const void* context, int piece, int thread) {
      (*static_cast<const Body*>(context))(piece, thread);
    }, &body);
    work_until_done(static_cast<uint32_t>(pieces));
  }

 private:
  using Call = void (*)(const void*, int piece, int thread);

  void dismiss();  // ends the workers
  void publish(int pieces, Call call, const void* context);
  void work_until_done(uint32_t pieces);
  void wait_for_workers(uint32_t pieces);
  bool claim(int thread, int& piece);
  bool work_one(int thread);
  void worker(int thread);
  void wait_for_news(uint32_t seen);
  bool take_callers_place();
  void return_from_rescue(const ThreadState& state);

  std::vector<std::thread> workers_;
  std::vector<ThreadState> states_;  // the calling thread's first
  Call call_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> pieces_{0};  // of the current phase
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> rescues_{0};
};

}  // namespace tokenmill
