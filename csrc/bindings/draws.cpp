// Sampling of tokens, at the end of a step or from given logits; called by tokenmill/sampling/samples.py.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "bindings/held_decoder.h"

namespace tokenmill {
namespace {

// Sampling parameters, one entry per row of logits.
struct Draws {
  const std::vector<float>& temperatures;
  const Numbers& top_ks;
  const std::vector<double>&top_ps, &min_ps, &uniforms;
  const std::vector<bool>& is_greedy;

  void check(size_t count) const {
    if (temperatures.size() != count || top_ks.size() != count || top_ps.size() != count || min_ps.size() != count ||
        uniforms.size() != count || is_greedy.size() != count)
      throw std::invalid_argument("the parameters must have one entry per row of logits");
    const auto is_share = [](double x) { return x >= 0.0 && x <= 1.0; };
    for (size_t i = 0; i < count; ++i)
      if (!(temperatures[i] >= 0.0f && std::isfinite(temperatures[i])) || !is_share(top_ps[i]) || !is_share(min_ps[i]) ||
          !is_share(uniforms[i]))
        throw std::invalid_argument("a parameter is outside its range");
  }
  DrawParams parameters(size_t i) const {
    return {temperatures[i], top_ks[i], top_ps[i], min_ps[i], uniforms[i], is_greedy[i]};
  }
};

// Samples a token from each of the given rows of logits; -1 if the row's highest logit is not finite.
Numbers draw_rows(Array<const float, 2> logits, const Numbers& lines, const std::vector<float>& temperatures,
                  const Numbers& top_ks, const std::vector<double>& top_ps, const std::vector<double>& min_ps,
                  const std::vector<double>& uniforms, const std::vector<bool>& is_greedy, const std::string& isa) {
  const Draws draws{temperatures, top_ks, top_ps, min_ps, uniforms, is_greedy};
  draws.check(lines.size());
  for (const int64_t line : lines)
    if (line < 0 || static_cast<size_t>(line) >= logits.shape(0)) throw std::out_of_range("there is no such row of logits");
  const Kernels& kernels = kernels_or_best(isa);
  Numbers tokens(lines.size());
  DrawRoom room;
  nb::gil_scoped_release free;
  for (size_t i = 0; i < lines.size(); ++i)
    tokens[i] = kernels.draw_token(logits.data() + static_cast<size_t>(lines[i]) * logits.shape(1),
                                   static_cast<int>(logits.shape(1)), draws.parameters(i), room);
  return tokens;
}

constexpr size_t kLinesAtOnce = 64;  // rows of logits in memory at a time

// A whole step that ends with sampling; the time of sampling is not counted as kernel time.
Numbers draw_next(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts, const std::vector<Numbers>& tokens,
                  const Numbers& num_outputs, const Tables& tables, int block_size, const Numbers& adapters,
                  const Numbers& owners, const std::vector<float>& temperatures,
                  const Numbers& top_ks, const std::vector<double>& top_ps, const std::vector<double>& min_ps,
                  const std::vector<double>& uniforms, const std::vector<bool>& is_greedy) {
  const DecoderLock lock(decoder);
  const BatchView& batch = lay_out(decoder, rows, starts, tokens, num_outputs, tables, block_size, adapters, owners);
  const size_t count = static_cast<size_t>(batch.outputs), vocab = static_cast<size_t>(decoder.vocab());
  const Draws draws{temperatures, top_ks, top_ps, min_ps, uniforms, is_greedy};
  draws.check(count);
  decoder.logit_lines.resize(std::max(decoder.logit_lines.size(), std::min(count, kLinesAtOnce) * vocab));
  decoder.draw_rooms.resize(static_cast<size_t>(decoder.pool().threads()));
  Numbers drawn(count);
  nb::gil_scoped_release free;
  decoder.timed([&] { decoder.forward(batch, nullptr, decoder.states.data()); });
  const int32_t* output_slots = decoder.output_slots();
  const std::vector<int32_t> slots(output_slots, output_slots == nullptr ? output_slots : output_slots + count);
  const Kernels& kernels = best_kernels();  // sampling always uses these, whatever the decoder uses
  for (size_t first = 0; first < count; first += kLinesAtOnce) {
    const int lines = static_cast<int>(std::min(count - first, kLinesAtOnce));
    const float* states = decoder.states.data() + first * static_cast<size_t>(decoder.hidden());
    const int32_t* own = slots.empty() ? nullptr : slots.data() + first;
    decoder.timed([&] { decoder.logits(states, lines, own, decoder.logit_lines.data()); });
    decoder.pool().run(lines, [&](int line, int thread) {
      const size_t at = static_cast<size_t>(line);
      drawn[first + at] =
          kernels.draw_token(decoder.logit_lines.data() + at * vocab, static_cast<int>(vocab), draws.parameters(first + at),
                             decoder.draw_rooms[static_cast<size_t>(thread)]);
    });
  }
  return drawn;
}

void softmax_rows(Array<const float, 2> logits, Array<float, 2> out, const std::string& isa) {
  if (out.shape(0) != logits.shape(0) || out.shape(1) != logits.shape(1))
    throw std::invalid_argument("logits and out differ in shape");
  const Kernels& kernels = kernels_or_best(isa);
  nb::gil_scoped_release free;
  for (size_t i = 0; i < logits.shape(0); ++i)
    kernels.softmax_row(logits.data() + i * logits.shape(1), static_cast<int>(logits.shape(1)),
                        out.data() + i * logits.shape(1));
}

}  // namespace

void bind_draws(nb::module_& m, nb::class_<HeldDecoder>& decoder) {
  m.def("softmax_rows", &softmax_rows, "logits"_a, "out"_a.noconvert(), "isa"_a = "");
  m.def("draw_rows", &draw_rows, "logits"_a, "lines"_a, "temperatures"_a, "top_ks"_a, "top_ps"_a, "min_ps"_a,
        "uniforms"_a, "is_greedy"_a, "isa"_a = "");
  decoder.def("draw_next", &draw_next, "rows"_a, "starts"_a, "tokens"_a, "num_outputs"_a, "tables"_a, "block_size"_a,
              "adapters"_a, "owners"_a, "temperatures"_a, "top_ks"_a, "top_ps"_a, "min_ps"_a, "uniforms"_a, "is_greedy"_a);
}

}  // namespace tokenmill
