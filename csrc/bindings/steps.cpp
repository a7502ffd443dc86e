// The decoder's computing calls: a step from arrays or from planned rows, and logits.
#include <cmath>
#include <stdexcept>

#include "bindings/held_decoder.h"

namespace tokenmill {
namespace {

void forward(HeldDecoder& decoder, Array<const int64_t, 1> token_ids, Array<const int64_t, 1> positions,
             Array<const int32_t, 1> query_starts, Array<const int32_t, 1> context_lens,
             const std::vector<Array<const int32_t, 2>>& block_tables, const std::vector<Array<const int64_t, 1>>& slots,
             Array<const int64_t, 1> logit_rows, Array<float, 2> hidden,
             const std::optional<Array<const int32_t, 1>>& adapters, const std::optional<Array<const float, 2>>& entering,
             const std::optional<Array<const int32_t, 1>>& owners) {
  const DecoderLock lock(decoder);
  BatchView batch;
  batch.tokens = static_cast<int>(token_ids.shape(0));
  batch.rows = static_cast<int>(context_lens.shape(0));
  batch.outputs = static_cast<int>(logit_rows.shape(0));
  batch.token_ids = token_ids.data();
  batch.positions = positions.data();
  batch.query_starts = query_starts.data();
  batch.context_lens = context_lens.data();
  batch.logit_rows = logit_rows.data();
  if (adapters) batch.adapters = adapters->data();
  if (owners) batch.owners = owners->data();
  bool fits = positions.shape(0) == token_ids.shape(0) && query_starts.shape(0) == context_lens.shape(0) + 1 &&
              block_tables.size() == slots.size() &&
              hidden.shape(0) == (decoder.is_last_stage() ? logit_rows.shape(0) : token_ids.shape(0)) &&
              hidden.shape(1) == static_cast<size_t>(decoder.hidden());
  fits = fits && (!adapters || adapters->shape(0) == token_ids.shape(0));
  fits = fits && (!owners || owners->shape(0) == context_lens.shape(0));
  fits = fits && (!entering || (entering->shape(0) == token_ids.shape(0) && entering->shape(1) == hidden.shape(1)));
  for (size_t g = 0; fits && g < slots.size(); ++g) {
    fits = block_tables[g].shape(0) == context_lens.shape(0) && slots[g].shape(0) == token_ids.shape(0);
    batch.groups.push_back({block_tables[g].data(), static_cast<int>(block_tables[g].shape(1)), slots[g].data()});
  }
  if (!fits) throw std::invalid_argument("the arrays of the batch do not fit together");
  nb::gil_scoped_release free;
  decoder.timed([&] { decoder.forward(batch, entering ? entering->data() : nullptr, hidden.data()); });
}

using MaybeSlots = std::optional<Array<const int32_t, 1>>;  // the rows' adapter slots

const int32_t* slots_of(const MaybeSlots& adapters, size_t rows) {
  if (!adapters) return nullptr;
  if (adapters->shape(0) != rows) throw std::invalid_argument("adapters must be [rows]");
  return adapters->data();
}

void logits(HeldDecoder& decoder, Array<const float, 2> hidden, Array<float, 2> out, const MaybeSlots& adapters) {
  const DecoderLock lock(decoder);
  const int32_t* slots = slots_of(adapters, hidden.shape(0));
  if (hidden.shape(1) != static_cast<size_t>(decoder.hidden()) || out.shape(0) != hidden.shape(0) ||
      out.shape(1) != static_cast<size_t>(decoder.vocab()))
    throw std::invalid_argument("hidden must be [rows, hidden] and out [rows, vocab]");
  nb::gil_scoped_release free;
  decoder.timed([&] { decoder.logits(hidden.data(), static_cast<int>(hidden.shape(0)), slots, out.data()); });
}

void best_logits(HeldDecoder& decoder, Array<const float, 2> hidden, Array<int64_t, 1> places, Array<float, 1> values,
                 const MaybeSlots& adapters) {
  const DecoderLock lock(decoder);
  const int32_t* slots = slots_of(adapters, hidden.shape(0));
  if (hidden.shape(1) != static_cast<size_t>(decoder.hidden()) || places.shape(0) != hidden.shape(0) ||
      values.shape(0) != hidden.shape(0))
    throw std::invalid_argument("hidden must be [rows, hidden], places and values [rows]");
  nb::gil_scoped_release free;
  decoder.timed([&] {
    decoder.best_logits(hidden.data(), static_cast<int>(hidden.shape(0)), slots, places.data(), values.data());
  });
}

Numbers greedy_next(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts, const std::vector<Numbers>& tokens,
                  const Numbers& num_outputs, const Tables& tables, int block_size, const Numbers& adapters,
                  const Numbers& owners) {
  const DecoderLock lock(decoder);
  const BatchView& batch = lay_out(decoder, rows, starts, tokens, num_outputs, tables, block_size, adapters, owners);
  Numbers places(static_cast<size_t>(batch.outputs));
  std::vector<float> values(static_cast<size_t>(batch.outputs));
  nb::gil_scoped_release free;
  decoder.timed([&] {
    decoder.forward(batch, nullptr, decoder.states.data());
    decoder.best_logits(decoder.states.data(), batch.outputs, decoder.output_slots(), places.data(), values.data());
  });
  for (size_t i = 0; i < places.size(); ++i)
    if (!std::isfinite(values[i])) places[i] = -1;
  return places;
}

void logits_next(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts, const std::vector<Numbers>& tokens,
                 const Numbers& num_outputs, const Tables& tables, int block_size, const Numbers& adapters,
                 const Numbers& owners, Array<float, 2> out) {
  const DecoderLock lock(decoder);
  const BatchView& batch = lay_out(decoder, rows, starts, tokens, num_outputs, tables, block_size, adapters, owners);
  if (out.shape(0) != static_cast<size_t>(batch.outputs) || out.shape(1) != static_cast<size_t>(decoder.vocab()))
    throw std::invalid_argument("out must be [output tokens, vocab]");
  nb::gil_scoped_release free;
  decoder.timed([&] {
    decoder.forward(batch, nullptr, decoder.states.data());
    decoder.logits(decoder.states.data(), batch.outputs, decoder.output_slots(), out.data());
  });
}

}  // namespace

const BatchView& lay_out(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts,
                         const std::vector<Numbers>& tokens, const Numbers& num_outputs, const Tables& tables,
                         int block_size, const Numbers& adapters, const Numbers& owners) {
  if (block_size < 1) throw std::invalid_argument("a block holds at least one token");
  if (!decoder.is_last_stage()) throw std::invalid_argument("this decoder does not have all layers of the model");
  const BatchView& batch = decoder.rows.lay_out(
      {tables.data(), tables.shape(0), tables.shape(1), tables.shape(2), block_size}, rows, starts, tokens, num_outputs,
      adapters, owners);
  decoder.states.resize(static_cast<size_t>(batch.outputs) * static_cast<size_t>(decoder.hidden()));
  return batch;
}

void bind_steps(nb::class_<HeldDecoder>& decoder) {
  decoder
      .def("forward", &forward, "token_ids"_a, "positions"_a, "query_starts"_a, "context_lens"_a, "block_tables"_a,
           "slots"_a, "logit_rows"_a, "hidden"_a.noconvert(), "adapters"_a.none() = nb::none(),
           "entering"_a.none() = nb::none(), "owners"_a.none() = nb::none())
      .def("logits", &logits, "hidden"_a, "out"_a.noconvert(), "adapters"_a.none() = nb::none())
      .def("best_logits", &best_logits, "hidden"_a, "places"_a.noconvert(), "values"_a.noconvert(),
           "adapters"_a.none() = nb::none())
      .def("greedy_next", &greedy_next, "rows"_a, "starts"_a, "tokens"_a, "num_outputs"_a, "tables"_a, "block_size"_a,
           "adapters"_a = Numbers(), "owners"_a = Numbers())
      .def("logits_next", &logits_next, "rows"_a, "starts"_a, "tokens"_a, "num_outputs"_a, "tables"_a, "block_size"_a,
           "adapters"_a, "owners"_a, "out"_a.noconvert());
}

}  // namespace tokenmill
