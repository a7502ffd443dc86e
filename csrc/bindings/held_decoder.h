// A decoder as Python holds it, and who adds its calls to it.
#pragma once
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <vector>

#include "bindings/arrays.h"
#include "step_rows.h"

namespace tokenmill {

using Numbers = std::vector<int64_t>;
using Tables = Array<const int32_t, 3>;

using Scales = std::optional<BlockScales>;

// The cache of a layer, which lives as long as the decoder may use it.
struct HeldCache {
  BlockArray keys, values;
  Scales key_scales, value_scales;
  std::optional<Array<float, 3>> inputs;  // of a convolution
  std::vector<AnyArray> recurrent;        // cells and states
  std::optional<AnyArray> entries = {};  // of latent attention
  std::optional<AnyArray> index_keys = {};  // of its indexer
  std::vector<AnyArray> compressed = {};    // entries of several tokens, and what they are made of
};

// A decoder as Python holds it: with the inputs of the present step, and the time spent in kernels.
class HeldDecoder : public Decoder {
 public:
  using Decoder::Decoder;
  std::vector<HeldCache> caches;  // of the layers
  StepRows rows;
  std::vector<float> states;  // [outputs][hidden]
  std::vector<float> logit_lines;  // [outputs][vocab]
  std::vector<DrawRoom> draw_rooms;  // one a thread
  double kernel_s = 0.0;
  std::atomic<bool> is_busy = false;

  template <class Work>
  void timed(const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    kernel_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
};

// A step's memory is the decoder's own, and other Python threads run meanwhile: a second call has to be refused.
class DecoderLock {
 public:
  explicit DecoderLock(HeldDecoder& decoder) : is_busy_(decoder.is_busy) {
    if (is_busy_.exchange(true)) throw std::runtime_error("this model computes already: one thread at a time may use it");
  }
  ~DecoderLock() { is_busy_.store(false); }
  DecoderLock(const DecoderLock&) = delete;
  DecoderLock& operator=(const DecoderLock&) = delete;

 private:
  std::atomic<bool>& is_busy_;
};

// The rows of a step as they are planned, laid out for the decoder.
const BatchView& lay_out(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts,
                         const std::vector<Numbers>& tokens, const Numbers& num_outputs, const Tables& tables,
                         int block_size, const Numbers& adapters, const Numbers& owners);

nb::class_<HeldDecoder> bind_decoders(nb::module_& m);
void bind_steps(nb::class_<HeldDecoder>& decoder);
void bind_draws(nb::module_& m, nb::class_<HeldDecoder>& decoder);

}  // namespace tokenmill
