// Threads that share a machine. Work is cut into small pieces that any thread claims when it is free, so a core lost to
// another process delays one piece and not a share of the whole; a thread that finds nothing to do spins for some
// microseconds, then sleeps in the kernel, which gives its core to the thread that was pushed aside.
//
//   ticket = epoch | end | next      one word, so a claim always belongs to the phase it names; pieces [next, end) are left
//
// Half of the threads take the next piece, the others the last one, until they meet. Rows that a thread wrote in one phase
// are then mostly those it reads in the following one, and its own caches still have them.
//
// A thread that is pushed off its core in the middle of a piece would hold all others up for a whole time slice of the
// other process (milliseconds). So a thread that waits and sees, by its processor time, that such a thread stands still,
// pulls it over to its own core (a "rescue"):
//
//   the caller waits for a worker:  it pulls the worker over and sleeps; the worker finishes its piece and goes back to
//                                   the crowded core, to wait there without work until it is scheduled again
//   a worker waits for the caller:  it pulls the caller over and takes its place on the crowded core
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "threads.h"

namespace tokenmill {

// A thread as the others see it: whether it may hold pieces of the present phase, and where it began with them.
class alignas(64) ThreadState {
 public:
  void begin();  // before its thread claims
  bool leave();  // after; whether it was pulled away meanwhile
  bool works() const { return hold_.load(std::memory_order_relaxed) != Hold::Nothing; }
  int clock() const { return clock_.load(std::memory_order_relaxed); }
  int core() const { return core_.load(std::memory_order_relaxed); }
  bool pull_to(int core);  // by another thread; false when its work has ended meanwhile, or it may not run there

 private:
  enum class Hold : int { Nothing, Pieces, BeingPulled, Pulled };
  std::atomic<Hold> hold_{Hold::Nothing};
  std::atomic<int> core_{-1}, clock_{-1};
  ThreadHandle thread_{};  // alive while it works: leave() waits for a thread that is pulling
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  uint64_t rescues() const { return rescues_.load(std::memory_order_relaxed); }

  static bool takes_next(int thread) { return thread % 2 == 0; }  // otherwise it goes from the last piece to the first
  // The piece that a thread takes after this one if all are equally fast; there may be none of that number.
  int piece_after(int piece, int thread) const {
    return takes_next(thread) ? piece + (threads() + 1) / 2 : piece - threads() / 2;
  }
  // Calls body(piece, thread) for every piece in [0, pieces); the caller works too and returns when all are done.
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
  std::vector<ThreadState> states_;  // the caller's first
  Call call_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> pieces_{0};  // of the present phase
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> rescues_{0};
};

}  // namespace tokenmill
