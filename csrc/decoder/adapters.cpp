// See adapters.h.
#include "adapters.h"

#include <algorithm>

#include "decoder/phases.h"

namespace tokenmill {

void AdapterSlots::declare(int slots, std::vector<Site> sites) {
  if (slots < 0) throw std::invalid_argument("the number of adapter slots must not be negative");
  sites_ = std::move(sites);
  parts_.clear();
  parts_.resize(static_cast<size_t>(slots));
}

void AdapterSlots::put(int slot, Parts parts) {
  if (slot < 1 || slot > slots()) throw std::out_of_range("there is no such adapter slot");
  std::vector<std::unique_ptr<LowRank>> held(sites_.size());
  for (auto& [number, part] : parts) {
    if (number < 0 || static_cast<size_t>(number) >= sites_.size()) throw std::out_of_range("there is no such site");
    const Site& site = sites_[static_cast<size_t>(number)];
    const Matrix &a = part.a.w, &b = part.b;
    const int rank = site.is_embedding ? a.cols : a.rows, inputs = site.is_embedding ? a.rows : a.cols;
    if (inputs != site.cols || b.rows != site.rows || b.cols != rank || is_quantised(a.kind) || is_quantised(b.kind) ||
        (!part.gain.empty() && (site.is_embedding || part.gain.size() != static_cast<size_t>(site.rows))))
      throw std::invalid_argument("an adapter does not fit its matrix");
    held[static_cast<size_t>(number)] = std::make_unique<LowRank>(std::move(part));
  }
  parts_[static_cast<size_t>(slot - 1)] = std::move(held);
}

const LowRank* AdapterSlots::find(int slot, int site) const {
  if (slot == 0 || site < 0) return nullptr;
  const auto& held = parts_[static_cast<size_t>(slot - 1)];
  return held.empty() ? nullptr : held[static_cast<size_t>(site)].get();
}

// Sets the adapter slots of the rows that are computed from now on; null: no row has an adapter.
void Decoder::take_adapters(const int32_t* slots, int rows) {
  row_slots_.clear();
  is_adapted_ = slots != nullptr && std::any_of(slots, slots + rows, [](int32_t slot) { return slot != 0; });
  if (!is_adapted_) return;
  for (int r = 0; r < rows; ++r)
    if (slots[r] < 0 || slots[r] > adapters_.slots()) throw std::invalid_argument("a row has no such adapter slot");
  row_slots_.assign(slots, slots + rows);
}

void Decoder::keep_wanted_adapters(const BatchView& batch) {
  if (!is_adapted_) return;
  std::vector<int32_t> kept(static_cast<size_t>(batch.outputs));
  for (int i = 0; i < batch.outputs; ++i) kept[static_cast<size_t>(i)] = row_slots_[static_cast<size_t>(batch.logit_rows[i])];
  row_slots_ = std::move(kept);
}

void Decoder::embed_adapters(const BatchView& batch) {
  if (!is_adapted_) return;
  for_rows(pool_, batch.tokens, 8 * hidden_, [&](int t) {
    const LowRank* part = adapters_.find(row_slots_[static_cast<size_t>(t)], embedding_.site);
    if (part == nullptr) return;
    Vector shrunk(static_cast<size_t>(part->b.cols));
    kernels_->embed(part->a.w, static_cast<int>(batch.token_ids[t]), 1.0f, shrunk.data());
    add_low_rank(*part, shrunk.data(), *kernels_, x_.data() + static_cast<size_t>(t) * hidden_);
  });
}

// Runs the products of a phase with this rank's rows of the matrices, adapters included.
void Decoder::run_own(const Gemm* gemms, int count) {
  const bool any_ordered = std::any_of(gemms, gemms + count, [](const Gemm& gemm) {
    return gemm.w->w.is_ordered || (gemm.up != nullptr && gemm.up->w.is_ordered);
  });
  if (!is_adapted_ && !any_ordered) return runner_.run(gemms, count);
  std::vector<Gemm> with(gemms, gemms + count);
  if (is_adapted_) run_shrinking(with);
  if (any_ordered) reorder_inputs(with);
  runner_.run(with.data(), count);
}

// Reorders the inputs of matrices whose columns are reordered (act order).
void Decoder::reorder_inputs(std::vector<Gemm>& gemms) {
  ordered_rows_.resize(std::max(ordered_rows_.size(), 2 * gemms.size()));
  const auto reordered = [&](const Matrix& w, const Rows& in, Activations& to) {
    const int32_t* order = w.order();
    fill_rows(in.quant.rows, w.cols, w.cols, to, {true, false, threshold_now_}, [&](int t, float* out) {
      const float* from = in.values + static_cast<size_t>(t) * in.stride;
      for (int c = 0; c < w.cols; ++c) out[c] = from[order[c]];
    });
    return to.view();
  };
  for (size_t g = 0; g < gemms.size(); ++g) {
    Gemm& gemm = gemms[g];
    const Rows in = gemm.in;
    if (gemm.w->w.is_ordered) gemm.in = reordered(gemm.w->w, in, ordered_rows_[2 * g]);
    if (gemm.up == nullptr) continue;
    gemm.up_in = gemm.up->w.is_ordered ? reordered(gemm.up->w, in, ordered_rows_[2 * g + 1]) : in;
  }
}

// Runs the products with the adapters' `a`; the main products then add b times their results.
void Decoder::run_shrinking(std::vector<Gemm>& with) {
  const std::vector<Gemm> gemms = with;
  const int count = static_cast<int>(gemms.size());
  adapted_rows_.resize(std::max(adapted_rows_.size(), 2 * static_cast<size_t>(count)));
  Shrinking shrinking;
  for (int g = 0; g < count; ++g) {
    AdaptedRows* rows = adapted_rows_.data() + 2 * g;
    const Gemm& gemm = gemms[static_cast<size_t>(g)];
    if (adapt(*gemm.w, gemm, rows[0], shrinking)) with[static_cast<size_t>(g)].adapted = rows;
    if (gemm.up != nullptr && adapt(*gemm.up, gemm, rows[1], shrinking)) with[static_cast<size_t>(g)].up_adapted = rows + 1;
  }
  grow(shrunk_, shrinking.size);
  for (size_t i = 0; i < shrinking.gemms.size(); ++i) shrinking.gemms[i].out = shrunk_.data() + shrinking.at[i];
  for (int r = 0; r < 2 * count; ++r) adapted_rows_[static_cast<size_t>(r)].shrunk = shrunk_.data();
  runner_.run(shrinking.gemms.data(), static_cast<int>(shrinking.gemms.size()));
}

// Plans the products with `a` for one matrix: one per run of rows with the same adapter. Returns whether there are any.
bool Decoder::adapt(const Linear& w, const Gemm& gemm, AdaptedRows& rows, Shrinking& shrinking) {
  const int count = gemm.in.quant.rows;
  const int32_t* slots = gemm.slots != nullptr ? gemm.slots : row_slots_.data();
  rows.parts.assign(static_cast<size_t>(count), nullptr);
  rows.at.assign(static_cast<size_t>(count), 0);
  bool any = false;
  for (int first = 0; first < count;) {
    int end = first + 1;
    while (end < count && slots[end] == slots[first]) ++end;
    if (const LowRank* part = adapters_.find(slots[first], w.site)) {
      const size_t rank = static_cast<size_t>(part->b.cols);
      Rows in{gemm.in.values + static_cast<size_t>(first) * gemm.in.stride, gemm.in.stride, {}};
      in.quant.rows = end - first;
      in.quant.tile = kernels_->tile_for(end - first);
      shrinking.gemms.push_back({&part->a, nullptr, in, Gemm::Mode::Store, nullptr, rank});
      shrinking.at.push_back(shrinking.size);
      for (int r = first; r < end; ++r) {
        rows.parts[static_cast<size_t>(r)] = part;
        rows.at[static_cast<size_t>(r)] = shrinking.size + static_cast<size_t>(r - first) * rank;
      }
      shrinking.size += static_cast<size_t>(end - first) * rank;
      any = true;
    }
    first = end;
  }
  return any;
}

}  // namespace tokenmill
