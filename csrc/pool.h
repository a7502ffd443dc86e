// Threads that share a machine. Work is cut into small pieces that any thread claims when it is free, so a core lost to
// another process delays one piece and not a share of the whole; a thread that finds nothing to do spins for some
// microseconds, then sleeps in the kernel, which gives its core to whoever was pushed aside.
//
//   ticket = epoch | number of pieces | next piece      one word, so a claim always belongs to the phase it names
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tokenmill {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

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
    work_until_done(pieces);
  }

 private:
  using Call = void (*)(const void*, int piece, int thread);

  void publish(int pieces, Call call, const void* context);
  void work_until_done(int pieces);
  bool claim(int& piece);
  bool work_one(int thread);
  void worker(int thread);
  void wait_for_news(uint32_t seen);

  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace tokenmill
