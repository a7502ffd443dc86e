// Products of many rows on AMX's tile unit; everything else is the AVX-512 code. One instruction multiplies 16 rows x 32
// inputs (one block) by the same inputs x 16 outputs (a panel's block already has the unit's layout) to 256 integer sums.
// AVX-512 scales and adds them block by block in the same order as without AMX, so the results have the same bits:
//
//   block b        sums → floats → fused multiply-adds, a register for each of the 16 rows
//   block b + 4    tiles → sums in memory: the latency is long, so four blocks are in flight at a time
//
// Every block has its own scale, so a tile takes 32 of the 64 inputs that it could (16 for formats with a scale per 16).
#define TM_ISA amx
#include <array>

#include "kernels.h"
#include "simd/avx512.h"
//
#include "kernels/linear.h"

namespace tokenmill {

const Kernels& avx512_kernels();

namespace amx {

constexpr int kRows = 16;  // per tile

constexpr int kDepth = 4;  // steps in flight

// Shapes of the tile registers for a tile of `count` rows, for steps of whole blocks or halves: 0 to 3 are sums of four
// steps; 4, 5 inputs; 6, 7 weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
constexpr auto make_shapes() {
  std::array<std::array<TileShapes, kRows + 1>, 2> shapes{};
  for (int half = 0; half < 2; ++half)
    for (int count = 0; count <= kRows; ++count)
      for (int i = 0; i < 8; ++i) {
        TileShapes& to = shapes[half][count];
        to.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? kBlock >> half : 64);
        to.rows[i] = static_cast<uint8_t>(i < 6 ? count : 8 >> half);
      }
  return shapes;
}
constexpr auto kShapes = make_shapes();

struct Scratch {
  ChunkScratch chunk;
  alignas(64) int32_t sums[kDepth][kRows * kPanel];
};

// Converts weights to signed bytes for dpbssd, so that sums start at 0.
template <Kind K>
void take_offset(int blocks, int slot, ChunkScratch& room, Expanded& to) {
  if constexpr (zero_shift(K) >= 0) {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(1 << zero_shift(K)));
    for (int at = 0; at < 512 * blocks; at += 64)
      store_bytes(room.bytes[slot] + at, {_mm512_sub_epi8(load_bytes(to.bytes[slot] + at).v, offset)});
    to.bytes[slot] = room.bytes[slot];
  }
}

// Macros, because tile registers are encoded in the instructions.
#define TM_MULTIPLY(sum, input, weight)   \
  _tile_zero(sum);                        \
  _tile_loadd(input, inputs, kBlock);     \
  _tile_loadd(weight, weights, 64);       \
  _tile_dpbssd(sum, input, weight);       \
  _tile_stored(sum, sums, 64);            \
  return
inline void multiply(int slot, const int8_t* inputs, const uint8_t* weights, int32_t* sums) {
  switch (slot) {
    case 0: TM_MULTIPLY(0, 4, 6);
    case 1: TM_MULTIPLY(1, 5, 7);
    case 2: TM_MULTIPLY(2, 4, 6);
    default: TM_MULTIPLY(3, 5, 7);
  }
}
#undef TM_MULTIPLY

// A chunk of one tile of rows, in steps: its blocks in the order that wide_tile adds them, or halves of blocks.
template <Kind K, bool Full>
struct Steps {
  static constexpr int halves = has_halves(K) ? 2 : 1;
  const TileChunk<K, kRows>& chunk;
  const int part_of_tile;  // number of rows, if the tile is not full

  int rows() const { return Full ? kRows : part_of_tile; }
  int num() const { return halves * chunk.steps(); }
  int half_block(int step) const { return halves * chunk.block(step / halves) + step % halves; }
  const uint8_t* record(int step) const {  // begins with the rows' scales and scaled sums
    const bool is_fine = step / halves >= chunk.blocks;
    const size_t block = static_cast<size_t>(chunk.block(step / halves));
    return chunk.records + (is_fine ? chunk.remainder_at : 0) + block * QuantRows::record_bytes(rows());
  }
  const int8_t* inputs(int step) const {
    return reinterpret_cast<const int8_t*>(record(step)) + QuantRows::numbers_at(rows()) + step % halves * 16;
  }
  // Calls body(m) for every row; unrolled if the number is known at compile time, so that sums stay in registers.
  template <class Body>
  inline __attribute__((always_inline)) void each_row(Body body) const {
    if constexpr (Full) {
      unroll<kRows>([&](auto m) { body(decltype(m)::value); });
    } else {
      for (int m = 0; m < part_of_tile; ++m) body(m);
    }
  }
};

// Multiplies all rows of a tile by one panel over a chunk, as wide_tile does.
template <Kind K, bool Full>
void tile(const Expanded& w, int panel, const Steps<K, Full> steps, Ahead& ahead, bool onto, float* out,
          size_t out_stride, Scratch& scratch) {
  constexpr int halves = Steps<K, Full>::halves;
  const int num = steps.num();
  const auto begin = [&](int step) {
    const uint8_t* weights = w.bytes[panel] + steps.half_block(step) * (512 / halves);
    multiply(step % kDepth, steps.inputs(step), weights, scratch.sums[step % kDepth]);
  };
  Floats acc[kRows];
  steps.each_row([&](int m) { acc[m] = onto ? load(out + m * out_stride) : zeros(); });
  for (int step = 0; step < std::min(kDepth, num); ++step) begin(step);
  for (int step = 0; step < num; ++step) {
    if (step % halves == 0 && step < halves * steps.chunk.blocks)
      ahead.fetch();
    const int32_t* sums = scratch.sums[step % kDepth];
    const auto* of_rows = reinterpret_cast<const float*>(steps.record(step));
    const Floats scale = load(w.d[panel] + steps.half_block(step) * kPanel);
    steps.each_row([&](int m) {
      const Ints sum{_mm512_load_si512(sums + m * kPanel)};
      acc[m] = fma(to_floats(sum), mul(scale, splat(of_rows[m])), acc[m]);
    });
    if constexpr (has_min(K)) {
      const Floats low = load(w.m[panel] + steps.half_block(step) * kPanel);
      const auto* sums_of_halves = reinterpret_cast<const int32_t*>(of_rows) + (4 + step % halves) * steps.rows();
      steps.each_row([&](int m) {
        const float sum = halves == 2 ? half_sum(of_rows[m], sums_of_halves[m]) : of_rows[steps.rows() + m];
        acc[m] = fma(low, splat(sum), acc[m]);
      });
    }
    if (step + kDepth < num) begin(step + kDepth);
  }
  steps.each_row([&](int m) { store(out + m * out_stride, acc[m]); });
}

template <Kind K>
void linear_tiles(const Matrix& w, const QuantRows& x, const Span& span, const Sums& to, Scratch& scratch) {
  const int even = chunk_of(w.blocks);
  int shaped = 0;
  for (int first = 0; first < w.blocks; first += even) {
    const int blocks = std::min(even, w.blocks - first);
    unroll<num_tables(K)>([&](auto which) {
      constexpr int part = decltype(which)::value;
      const bool onto = to.onto || first > 0 || part > 0;
      Expanded expanded{};
      for (int n = 0; n < span.panels; ++n) {
        expand_panel<K, part>(w, span.panel + n, first, blocks, n, scratch.chunk, expanded);
        take_offset<K>(blocks, n, scratch.chunk, expanded);
      }
      asm volatile("" ::: "memory");  // the compiler does not see that tile instructions read memory
      const int tiles = (span.tile_end - span.tile) * span.panels;
      Ahead ahead = share_ahead(w, part == 0 ? span.next : -1, span.panels, first, blocks, tiles);
      for (int t = span.tile; t < span.tile_end; ++t) {
        const TileChunk<K, kRows> in(x, t, first, blocks);
        if (x.rows_in(t) != shaped) {
          shaped = x.rows_in(t);
          _tile_loadconfig(&kShapes[has_halves(K)][static_cast<size_t>(shaped)]);
        }
        for (int n = 0; n < span.panels; ++n) {
          float* out = to.out + static_cast<size_t>(t - span.tile) * x.tile * to.stride + n * kPanel;
          if (shaped == kRows) tile<K, true>(expanded, n, {in, kRows}, ahead, onto, out, to.stride, scratch);
          else tile<K, false>(expanded, n, {in, shaped}, ahead, onto, out, to.stride, scratch);
        }
      }
    });
  }
  _tile_release();  // context switches of a thread with tile state are more expensive
}

void linear_or_avx512(const Matrix& w, const Rows& x, const Span& span, const Sums& to, uint8_t* scratch) {
  if (!is_quantised(w.kind) || x.quant.tile != kRows) return avx512_kernels().linear(w, x, span, to, scratch);
  with_kind(w.kind, [&](auto kind) {
    constexpr Kind K = decltype(kind)::value;
    if constexpr (is_quantised(K)) linear_tiles<K>(w, x.quant, span, to, *reinterpret_cast<Scratch*>(scratch));
  });
}

size_t scratch_bytes(const Matrix& w) { return is_quantised(w.kind) ? sizeof(Scratch) : 0; }

Kernels make_kernels() {
  Kernels kernels = avx512_kernels();
  kernels.name = "amx";
  kernels.many_rows = 64;  // for fewer rows, converting the weights costs more than it saves (docs/experiments/cpu-gemm.md)
  kernels.wide_tile_rows = kRows;
  kernels.linear_scratch_bytes = scratch_bytes;
  kernels.linear = linear_or_avx512;
  return kernels;
}

}  // namespace amx

const Kernels& amx_kernels() {
  static const Kernels table = amx::make_kernels();
  return table;
}

}  // namespace tokenmill
