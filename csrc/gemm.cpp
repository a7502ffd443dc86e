// See gemm.h.
#include "gemm.h"

#include <algorithm>
#include <cstring>

namespace tokenmill {
namespace {

constexpr int kPair = 2 * kPanel;

template <class T>
void grow(std::vector<T>& v, size_t size) {
  if (v.size() < size) v.resize(size);
}

size_t scratch_alignment(uint8_t* p) { return (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64; }

}  // namespace

void Activations::prepare(int rows, int cols, const Kernels& kernels, bool quantised, bool plain) {
  cols_ = cols;
  quantised_ = quantised;
  plain_ = plain;
  quant_.rows = rows;
  quant_.tile = rows <= kernels.small_rows ? std::max(rows, 1) : kernels.tile_rows;
  quant_.blocks = cols / kBlock;
  const size_t size = static_cast<size_t>(rows) * cols, blocks = static_cast<size_t>(rows) * quant_.blocks;
  if (plain) grow(values_, size);
  if (!quantised) return;
  grow(q_, size * static_cast<size_t>(quant_.parts));
  grow(scale_, blocks);
  grow(scaled_sum_, blocks);
  grow(sum_, blocks);
  grow(halves_, 2 * blocks);
  quant_.q = q_.data();
  quant_.scale = scale_.data();
  quant_.scaled_sum = scaled_sum_.data();
  quant_.negative_sum = sum_.data();
  quant_.negative_halves = halves_.data();
}

Rows Activations::view() const { return {values_.data(), static_cast<size_t>(cols_), quant_}; }

void Activations::put_block(int r, int block, const float* values, int count, const Kernels& kernels) {
  if (quantised_) kernels.quantise_block(values, quant_, r, block);
  if (plain_) std::memcpy(row(r) + block * kBlock, values, sizeof(float) * static_cast<size_t>(count));
}

Runner::Plan Runner::plan(const Gemm& gemm, int first_piece) const {
  const Matrix& m = gemm.w->w;
  const int tiles = gemm.in.quant.tiles();
  const int row_blocks = (tiles + kTilesPerCall - 1) / kTilesPerCall;
  const int pairs = (m.panels + 1) / 2;
  // Seconds of one pair: its bytes at 8 GB/s or its products at 300 GFLOP/s, whichever is longer.
  const double rows = static_cast<double>(gemm.in.quant.rows) / std::max(row_blocks, 1);
  const double bytes = 2.0 * static_cast<double>(m.panel_bytes) * (gemm.up ? 2 : 1);
  const double flops = 2.0 * rows * kPair * m.cols * (gemm.up ? 2 : 1);
  const double seconds = std::max(bytes / 8e9, flops / 300e9);
  const int wanted = static_cast<int>(5e-6 / seconds);
  const int most = std::max(1, pairs * row_blocks / (6 * pool_.threads()));
  return {pairs, row_blocks, std::clamp(wanted, 1, most), first_piece};
}

void Runner::run(const Gemm* gemms, int count) {
  int pieces = 0;
  plans_.clear();
  for (int g = 0; g < count; ++g) {
    const Plan p = plan(gemms[g], pieces);
    plans_.push_back(p);
    pieces += p.row_blocks * ((p.pairs + p.pairs_per_piece - 1) / p.pairs_per_piece);
  }
  pool_.run(pieces, [&](int index, int thread) {
    int g = count - 1;
    while (plans_[static_cast<size_t>(g)].first_piece > index) --g;
    const Plan& p = plans_[static_cast<size_t>(g)];
    piece(gemms[g], p, index - p.first_piece, thread);
  });
}

void Runner::piece(const Gemm& gemm, const Plan& plan, int index, int thread) {
  const int groups = (plan.pairs + plan.pairs_per_piece - 1) / plan.pairs_per_piece;
  const int tile = index / groups * kTilesPerCall;
  const int tile_end = std::min(gemm.in.quant.tiles(), tile + kTilesPerCall);
  const int first = index % groups * plan.pairs_per_piece;
  for (int pair = first; pair < std::min(plan.pairs, first + plan.pairs_per_piece); ++pair)
    this->tile(gemm, pair, tile, tile_end, thread);
}

void Runner::tile(const Gemm& gemm, int pair, int tile, int tile_end, int thread) {
  Scratch& scratch = scratch_[static_cast<size_t>(thread)];
  const QuantRows& rows = gemm.in.quant;
  const int row = tile * rows.tile, row_end = std::min(rows.rows, tile_end * rows.tile);
  const Matrix& m = gemm.w->w;
  const int column = pair * kPair, columns = std::min(kPair, m.rows - column);
  const int panels = std::min(2, m.panels - 2 * pair);
  const auto product = [&](const Linear& w, std::vector<float>& out) {
    grow(out, static_cast<size_t>(row_end - row) * kPair);
    grow(scratch.expanded, kernels_.linear_scratch_bytes(w.w) + 64);
    uint8_t* aligned = scratch.expanded.data() + scratch_alignment(scratch.expanded.data());
    kernels_.linear(w.w, gemm.in, 2 * pair, panels, tile, tile_end, out.data(), kPair, aligned);
    if (w.bias.empty()) return;
    for (int r = 0; r < row_end - row; ++r) kernels_.add(out.data() + r * kPair, w.bias.data() + column, columns);
  };
  product(*gemm.w, scratch.out[0]);
  if (gemm.up != nullptr) product(*gemm.up, scratch.out[1]);
  for (int r = row; r < row_end; ++r) {
    float* values = scratch.out[0].data() + static_cast<size_t>(r - row) * kPair;
    if (gemm.mode == Gemm::Mode::Gate) {
      float gated[kPair];
      kernels_.gate(values, scratch.out[1].data() + static_cast<size_t>(r - row) * kPair, gemm.activation, gated);
      gemm.gated->put_block(r, pair, gated, columns, kernels_);
      continue;
    }
    float* out = gemm.out + static_cast<size_t>(r) * gemm.out_stride + column;
    if (gemm.mode == Gemm::Mode::Add) kernels_.add(out, values, columns);
    else std::memcpy(out, values, sizeof(float) * static_cast<size_t>(columns));
  }
}

}  // namespace tokenmill
