// Memory that the ranks of a group share, in which each hands its part of a result to the others: processes of one host
// (a memory file that all have mapped) or threads of one process (the same memory).
//
//   header | turn 0: room of rank 0, room of rank 1, ... | turn 1: room of rank 0, ...
//
// An exchange: every rank writes into its own room of the turn, all meet, every rank reads the others' rooms. Turns change
// from one exchange to the next, so nothing waits for readers: who writes into a room again has met all ranks since, and
// they had read it by then.
//
// A wait spins for a moment, then sleeps in the kernel. It ends with an exception when the group was given up (`abort`, by
// any rank or by who watches them), or when it lasts too long.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace tokenmill {

// Another rank is gone, or does not come.
struct PeersGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Window {
 public:
  static size_t bytes_for(int size, size_t room_bytes);
  // Memory of `bytes_for` bytes that is zero at first; `keep` holds it.
  Window(uint8_t* memory, std::shared_ptr<void> keep, int rank, int size, size_t room_bytes);

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t room_bytes() const { return room_bytes_; }

  uint8_t* own() const { return room(rank_); }
  const uint8_t* of(int rank) const { return room(rank); }
  void meet();         // all ranks have written into their rooms
  void next_turn() { turn_ ^= 1; }

  void abort();
  bool is_aborted() const { return header().aborted.load(std::memory_order_relaxed) != 0; }
  void set_limit_s(double seconds) { limit_s_ = seconds; }

 private:
  struct Header {
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> round;  // how often all have met
    alignas(64) std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> aborted;
  };
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  uint8_t* room(int rank) const {
    return memory_ + sizeof(Header) + static_cast<size_t>(turn_ * size_ + rank) * room_bytes_;
  }
  void wait_for_others(uint32_t round);
  void require_all_there() const;

  uint8_t* memory_;
  std::shared_ptr<void> keep_;
  int rank_, size_;
  size_t room_bytes_;
  int turn_ = 0;
  double limit_s_ = 300.0;
};

// Memory of `Window::bytes_for(size, room_bytes)` bytes for ranks that are threads, or the memory file `descriptor`.
std::shared_ptr<void> window_memory(int size, size_t room_bytes);
std::shared_ptr<void> mapped_window(int descriptor, int size, size_t room_bytes);

}  // namespace tokenmill
