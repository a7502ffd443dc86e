// See gemm.h.
#include "gemm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tokenmill {
namespace {

constexpr int kPair = 2 * kPanel;

size_t scratch_alignment(uint8_t* p) { return (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64; }

}  // namespace

void Activations::prepare(int rows, int cols, const Kernels& kernels, const Form& form) {
  cols_ = cols;
  form_ = form;
  quant_.rows = rows;
  quant_.tile = kernels.tile_for(rows);
  quant_.blocks = cols / kBlock;
  if (form.plain) grow(values_, static_cast<size_t>(rows) * cols);
  if (!form.quantised) return;
  const bool fine = form.outlier_threshold < std::numeric_limits<float>::infinity();
  const int full = rows / quant_.tile, rest = rows % quant_.tile;
  const size_t of_block = full * QuantRows::record_bytes(quant_.tile) + QuantRows::record_bytes(rest);
  const size_t bytes = of_block * static_cast<size_t>(quant_.blocks);
  grow(records_, (fine ? 2 : 1) * bytes + 64);
  quant_.records = records_.data() + scratch_alignment(records_.data());
  quant_.remainder_at = fine ? bytes : 0;
  if (fine) grow(lists_, static_cast<size_t>(quant_.tiles()) * (quant_.blocks + 1));
  quant_.lists = lists_.data();
}

Rows Activations::view() const { return {values_.data(), static_cast<size_t>(cols_), quant_}; }

void Activations::put_row(int r, const float* values, const Kernels& kernels) {
  if (form_.quantised) quantise_rows(r, 1, values, kernels);
  if (form_.plain) std::copy_n(values, cols_, row(r));
}

Runner::Plan Runner::plan(const Gemm& gemm) const {
  const Matrix& m = gemm.w->w;
  const int tiles = gemm.in.quant.tiles();
  const int row_blocks = (tiles + kTilesPerCall - 1) / kTilesPerCall;
  const int tiles_per_block = row_blocks == 0 ? 0 : (tiles + row_blocks - 1) / row_blocks;
  const int pairs = (m.panels + 1) / 2;
  // Estimated seconds per pair: its bytes at 8 GB/s or its products at 300 GFLOP/s, whichever is longer.
  const double rows = static_cast<double>(gemm.in.quant.rows) / std::max(row_blocks, 1);
  const double bytes = 2.0 * static_cast<double>(m.panel_bytes) * (gemm.up ? 2 : 1);
  const double flops = 2.0 * rows * kPair * m.cols * (gemm.up ? 2 : 1);
  const double seconds = std::max(bytes / 8e9, flops / 300e9);
  const int target = static_cast<int>(5e-6 / seconds);
  const int most = std::max(1, pairs * row_blocks / (6 * pool_.threads()));
  const int per_piece = std::clamp(target, 1, most);
  return {pairs, row_blocks, tiles_per_block, per_piece, 0, seconds};
}

// Cuts the middle half of the work into small pieces and the rest into long ones, if that gives each thread several.
void Runner::cut(std::vector<Plan>& plans) const {
  double total = 0.0, before = 0.0;
  for (const Plan& p : plans) total += p.all() * p.seconds;
  int pieces = 0;
  for (Plan& p : plans) {
    const double unit = p.per_piece * p.seconds, work = p.all() * p.seconds;
    const auto long_in = [&](double seconds) {
      return std::clamp(static_cast<int>(seconds / unit), 0, p.units()) / Plan::kLong;
    };
    const bool pays = p.all() >= 4 * Plan::kLong * p.per_piece * pool_.threads();
    p.long_before = pays ? long_in(total / 4 - before) : 0;
    p.small = p.units() - Plan::kLong * (p.long_before + (pays ? long_in(before + work - total * 3 / 4) : 0));
    p.first_piece = pieces;
    pieces += p.pieces();
    before += work;
  }
}

void Runner::run(const Gemm* gemms, int count) {
  plans_.clear();
  for (int g = 0; g < count; ++g) plans_.push_back(plan(gemms[g]));
  cut(plans_);
  const int pieces = count == 0 ? 0 : plans_.back().first_piece + plans_.back().pieces();
  pool_.run(pieces, [&](int index, int thread) {
    int g = count - 1;
    while (plans_[static_cast<size_t>(g)].first_piece > index) --g;
    const Plan& p = plans_[static_cast<size_t>(g)];
    piece(gemms[g], p, index - p.first_piece, thread);
  });
}

void Runner::piece(const Gemm& gemm, const Plan& plan, int index, int thread) {
  const int end = plan.start(index + 1);
  const int next_piece = pool_.piece_after(index, thread);
  const int after = next_piece < 0 ? plan.all() : plan.start(next_piece);
  for (int i = plan.start(index); i < end; ++i) {
    const int pair = i % plan.pairs, tile = i / plan.pairs * plan.tiles_per_block;
    const int tile_end = std::min(gemm.in.quant.tiles(), tile + plan.tiles_per_block);
    const int next = i + 1 < end ? i + 1 : after;
    this->pair(gemm, {2 * pair, std::min(2, gemm.w->w.panels - 2 * pair), tile, tile_end,
                      next < plan.all() ? 2 * (next % plan.pairs) : -1}, thread);
  }
}

void Runner::pair(const Gemm& gemm, const Span& span, int thread) {
  if (gemm.mode == Gemm::Mode::Gate) return gate(gemm, span, thread);
  if (gemm.mode == Gemm::Mode::Best) return best(gemm, span, thread);
  const int column = span.panel * kPanel, columns = std::min(span.panels * kPanel, gemm.w->w.rows - column);
  float* out = gemm.out + static_cast<size_t>(span.tile) * gemm.in.quant.tile * gemm.out_stride + column;
  const bool onto = gemm.mode == Gemm::Mode::Add;
  if (columns == span.panels * kPanel) return product(*gemm.w, gemm.in, span, {out, gemm.out_stride, onto}, thread, gemm.adapted);
  // A panel with fewer outputs than lanes: its sums don't fit in the output and go to scratch memory first.
  const int rows = rows_of(gemm.in, span);
  float* sums = room(thread, 0, rows);
  const auto copy = [&](const float* from, size_t from_stride, float* to, size_t to_stride) {
    for (int r = 0; r < rows; ++r)
      std::memcpy(to + r * to_stride, from + r * from_stride, sizeof(float) * static_cast<size_t>(columns));
  };
  if (onto) copy(out, gemm.out_stride, sums, kPair);
  product(*gemm.w, gemm.in, span, {sums, kPair, onto}, thread, gemm.adapted);
  copy(sums, kPair, out, gemm.out_stride);
}

void Runner::gate(const Gemm& gemm, const Span& span, int thread) {
  const int rows = rows_of(gemm.in, span), row = span.tile * gemm.in.quant.tile;
  float* gates = room(thread, 0, rows);
  float* ups = room(thread, 1, rows);
  product(*gemm.w, gemm.in, span, {gates, kPair, false}, thread, gemm.adapted);
  if (gemm.up != nullptr) product(*gemm.up, gemm.up_in ? *gemm.up_in : gemm.in, span, {ups, kPair, false}, thread, gemm.up_adapted);
  else std::fill_n(ups, static_cast<size_t>(rows) * kPair, 1.0f);  // an MLP without a gate: act(x) * 1
  if (gemm.gated->is_quantised())
    kernels_.gate_rows(gates, ups, rows, gemm.activation, gemm.gated->quant(), row, span.panel / 2);
  if (!gemm.gated->is_plain()) return;
  const int column = span.panel * kPanel, columns = std::min(kPair, gemm.w->w.rows - column);
  for (int r = 0; r < rows; ++r) {
    float gated[kPair];
    kernels_.gate(gates + r * kPair, ups + r * kPair, gemm.activation, gated);
    std::copy_n(gated, columns, gemm.gated->row(row + r) + gemm.w->first + column);
  }
}

void Runner::best(const Gemm& gemm, const Span& span, int thread) {
  const int rows = rows_of(gemm.in, span), row = span.tile * gemm.in.quant.tile;
  const int column = span.panel * kPanel, columns = std::min(kPair, gemm.w->w.rows - column);
  float* sums = room(thread, 0, rows);
  product(*gemm.w, gemm.in, span, {sums, kPair, false}, thread, gemm.adapted);
  Best* seen = gemm.best + static_cast<size_t>(thread) * gemm.in.quant.rows + row;
  for (int r = 0; r < rows; ++r) {
    if (gemm.scale != 1.0f) kernels_.scale(sums + r * kPair, gemm.scale, columns);
    if (gemm.softcap > 0.0f) kernels_.softcap(sums + r * kPair, gemm.softcap, columns);
    if (Pool::takes_next(thread)) kernels_.take_best(sums + r * kPair, columns, column, seen[r]);
    else take_best_before(sums + r * kPair, columns, column, seen[r]);
  }
}

// The same for a thread that takes pieces from the last to the first: these numbers have lower indices than those seen so
// far, and of equal numbers the first wins. So they are compared with the next smaller number than the best.
void Runner::take_best_before(const float* x, int size, int place, Best& best) const {
  Best now = best;
  now.value -= std::abs(now.value) * 1e-6f + std::numeric_limits<float>::min();
  kernels_.take_best(x, size, place, now);
  best.has_nan = now.has_nan;
  if (now.value > best.value || (now.value == best.value && now.place < best.place)) best = now;
}

void Runner::product(const Linear& w, const Rows& in, const Span& span, const Sums& to, int thread,
                     const AdaptedRows* adapted) {
  const float* before = nullptr;  // the values to which the product is added
  if (adapted != nullptr && to.onto) {
    const int rows = rows_of(in, span);
    float* kept = room(thread, 2, rows);
    for (int r = 0; r < rows; ++r) std::copy_n(to.out + r * to.stride, span.panels * kPanel, kept + r * kPair);
    before = kept;
  }
  std::vector<uint8_t>& expanded = scratch_[static_cast<size_t>(thread)].expanded;
  grow(expanded, kernels_.linear_scratch_bytes(w.w) + 64);
  kernels_.linear(w.w, in, span, to, expanded.data() + scratch_alignment(expanded.data()));
  if (adapted != nullptr) adapt(*adapted, w, in, span, to, before);
  if (w.bias.empty()) return;
  const int column = span.panel * kPanel, columns = std::min(span.panels * kPanel, w.w.rows - column);
  for (int r = 0; r < rows_of(in, span); ++r) kernels_.add(to.out + r * to.stride, w.bias.data() + column, columns);
}

// Adds the updates of the rows' adapters to these columns, before the bias is added.
void Runner::adapt(const AdaptedRows& adapted, const Linear& w, const Rows& in, const Span& span, const Sums& to,
                   const float* before) {
  const int column = span.panel * kPanel, columns = std::min(span.panels * kPanel, w.w.rows - column);
  const size_t first = static_cast<size_t>(span.tile) * static_cast<size_t>(in.quant.tile);
  for (int r = 0; r < rows_of(in, span); ++r) {
    const LowRank* part = adapted.parts[first + static_cast<size_t>(r)];
    if (part == nullptr) continue;
    float* out = to.out + r * to.stride;
    if (!part->gain.empty())
      for (int c = 0; c < columns; ++c) {
        const float own = before == nullptr ? out[c] : out[c] - before[r * kPair + c];
        out[c] += part->gain[static_cast<size_t>(column + c)] * own;
      }
    add_low_rank(*part, adapted.shrunk + adapted.at[first + static_cast<size_t>(r)], kernels_, span.panel, span.panels, out);
  }
}

// Adds all rows of b; the last panel may be wider than the rest of `out`.
void add_low_rank(const LowRank& part, const float* shrunk, const Kernels& kernels, float* out) {
  for (int panel = 0; panel < part.b.panels; ++panel) {
    const int column = panel * kPanel, columns = std::min(kPanel, part.b.rows - column);
    float sums[kPanel] = {};
    std::copy_n(out + column, columns, sums);
    add_low_rank(part, shrunk, kernels, panel, 1, sums);
    std::copy_n(sums, columns, out + column);
  }
}

int Runner::rows_of(const Rows& in, const Span& span) {
  return std::min(in.quant.rows, span.tile_end * in.quant.tile) - span.tile * in.quant.tile;
}

float* Runner::room(int thread, int which, int rows) {
  std::vector<float>& out = scratch_[static_cast<size_t>(thread)].out[which];
  grow(out, static_cast<size_t>(rows) * kPair);
  return out.data();
}

}  // namespace tokenmill
