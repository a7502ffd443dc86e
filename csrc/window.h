// Shared memory by which the ranks of a group exchange parts of results: processes of one host (an anonymous file that all
// map) or threads of one process.
//
//   header | turn 0: buffer ("room") of rank 0, of rank 1, ... | turn 1: buffer of rank 0, ...
//
// An exchange: every rank writes to its own buffer of the turn, all ranks wait at a barrier (`meet`), every rank reads the
// others' buffers. Exchanges alternate between the two turns, so no second barrier is needed: before a rank writes to the
// same buffer again it has passed the next exchange's barrier, which the others reach only after reading.
//
// A wait spins briefly, then sleeps in the kernel. It ends with an exception when the group is aborted (`abort`, by any rank
// or by the process that supervises them), or after a timeout.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace tokenmill {

// Thrown if another rank has ended, or does not reach the barrier in time.
struct PeersGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Window {
 public:
  static size_t bytes_for(int size, size_t room_bytes);
  // `memory`: `bytes_for` bytes, initially zero, which `keep` keeps alive.
  Window(uint8_t* memory, std::shared_ptr<void> keep, int rank, int size, size_t room_bytes);

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t room_bytes() const { return room_bytes_; }

  uint8_t* own() const { return room(rank_); }
  const uint8_t* of(int rank) const { return room(rank); }
  void meet();         // barrier: returns when all ranks have written to their buffers
  void next_turn() { turn_ ^= 1; }

  void abort();
  bool is_aborted() const { return header().aborted.load(std::memory_order_relaxed) != 0; }
  void set_limit_s(double seconds) { limit_s_ = seconds; }

 private:
  struct Header {
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> round;  // number of completed barriers
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

// Memory of `Window::bytes_for(size, room_bytes)` bytes for ranks that are threads, or the mapped file `descriptor`.
std::shared_ptr<void> window_memory(int size, size_t room_bytes);
std::shared_ptr<void> mapped_window(int descriptor, int size, size_t room_bytes);

}  // namespace tokenmill
