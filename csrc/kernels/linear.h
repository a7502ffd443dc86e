// y = W x for packed matrices. Per block of 32 inputs the int8 dot product is exact; then one multiply of the two
// scales and one fused multiply-add. Every tile does these in the same order for an output, so a row's result has the
// same bits whether it is computed alone or among hundreds:
//
//   acc = fma(float(dot), w_scale * x_scale, acc);  with minima also  acc = fma(w_min, x_scaled_sum, acc)
//
// Unsigned weights times signed activations: the offset of the weights is taken back by starting the integer sum at
// -offset * sum(x), which costs nothing but a shift. Activations of two bytes go through twice: the sum over the first
// bytes is multiplied by 256 before the second ones are added to it, still exact in 32 bits.
#pragma once
#include <algorithm>
#include <utility>

namespace tokenmill::TM_ISA {

template <int... J, class Body>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, J...>, Body body) {
  (body(std::integral_constant<int, J>{}), ...);
}
template <int N, class Body>
inline __attribute__((always_inline)) void unroll(Body body) {
  unrolled(std::make_integer_sequence<int, N>{}, body);
}

// ── one block of packed weights ──
template <int Bits, int Group>
inline __attribute__((always_inline)) Bytes unpack_group(const uint8_t* p) {
  if constexpr (Bits == 8) return load_bytes(p + 64 * Group);
  const Bytes both = load_bytes(p + 64 * (Group % 4));
  Bytes low = Group < 4 ? low_nibbles(both) : high_nibbles(both);
  if constexpr (Bits == 5) low = add_fifth_bit(low, p + 256 + 8 * Group);
  if constexpr (Bits == 6) low = add_bit_pair<Group % 4>(low, load_bytes(p + 256 + 64 * (Group / 4)));
  return low;
}

struct BlockScales {
  Floats d[2];  // the second only where there is a scale per 16 inputs
  Floats m;
};

template <Kind K>
inline __attribute__((always_inline)) BlockScales read_scales(const uint8_t* scales, int block) {
  BlockScales out{};
  const auto half = [](const uint8_t* p) { return load_half(reinterpret_cast<const uint16_t*>(p)); };
  if constexpr (has_supers(K)) {
    const uint8_t* base = scales + (block / kSuper) * scale_bytes(K);
    const int j = block % kSuper;
    if constexpr (K == Kind::Q6_K) {
      out.d[0] = mul(half(base), load_i8(base + 32 + 32 * j));
      out.d[1] = mul(half(base), load_i8(base + 48 + 32 * j));
    } else {
      out.d[0] = mul(half(base), load_u8(base + 64 + 16 * j));
      out.m = mul(sub(zeros(), half(base + 32)), load_u8(base + 192 + 16 * j));
    }
  } else {
    const uint8_t* base = scales + block * scale_bytes(K);
    out.d[0] = half(base);
    if constexpr (has_min(K)) out.m = half(base + 32);
  }
  return out;
}

// ── activations of one tile ──
struct TileRows {
  const int8_t* q;
  int parts;
  const float* scale;
  const int32_t* negative_sum;
  const int32_t* negative_halves;
  const float* scaled_sum;

  TileRows(const QuantRows& rows, int t, int first_block = 0) {
    const size_t at = rows.start(t) + static_cast<size_t>(first_block) * rows.rows_in(t);
    q = rows.q + at * kBlock * rows.parts;
    parts = rows.parts;
    scale = rows.scale + at;
    negative_sum = rows.negative_sum + at;
    negative_halves = rows.negative_halves + 2 * at;
    scaled_sum = rows.scaled_sum + at;
  }
};

template <Kind K>
inline __attribute__((always_inline)) Ints start_of_sum(int32_t negative_sum) {
  if constexpr (zero_shift(K) < 0) return splat_int(0);
  return shift_left(splat_int(negative_sum), zero_shift(K));
}

// ── M rows x one panel, straight from the packed form: for few rows, where reading the weights is what costs ──
template <Kind K, int M>
void small_tile(const Matrix& w, int panel, const TileRows& x, float* out, size_t out_stride) {
  constexpr int bits = payload_bits(K);
  constexpr int halves = has_halves(K) ? 2 : 1;
  const uint8_t* payload = w.panel(panel);
  const uint8_t* scales = payload + w.scales_at;
  Floats acc[M];
  for (int m = 0; m < M; ++m) acc[m] = zeros();
  for (int b = 0; b < w.blocks; ++b, payload += payload_bytes(K)) {
    for (size_t ahead = 0; ahead < payload_bytes(K); ahead += 64) prefetch(payload + 2048 + ahead);
    const BlockScales s = read_scales<K>(scales, b);
    const int row_bytes = x.parts * kBlock;
    const int8_t* q = x.q + static_cast<size_t>(b) * M * row_bytes;
    unroll<halves>([&](auto half) {
      constexpr int h = decltype(half)::value;
      Ints dot[M];
      const auto start = [&](int m) {
        return start_of_sum<K>(halves == 2 ? x.negative_halves[(2 * b + h) * M + m] : x.negative_sum[b * M + m]);
      };
      const auto add_part = [&](const int8_t* in) __attribute__((always_inline)) {
        unroll<8 / halves>([&](auto step) {
          constexpr int group = decltype(step)::value + h * 4;
          const Bytes weights = unpack_group<bits, group>(payload);
          for (int m = 0; m < M; ++m)
            dot[m] = dot4<bits == 8>(dot[m], weights, splat_inputs(in + m * row_bytes + 4 * group));
        });
      };
      for (int m = 0; m < M; ++m) dot[m] = x.parts == 1 ? start(m) : splat_int(0);
      add_part(q);
      if (x.parts == 2) {
        for (int m = 0; m < M; ++m) dot[m] = add(shift_left(dot[m], 8), start(m));
        add_part(q + kBlock);
      }
      for (int m = 0; m < M; ++m) acc[m] = fma(to_floats(dot[m]), mul(s.d[h], splat(x.scale[b * M + m])), acc[m]);
    });
    if constexpr (has_min(K))
      for (int m = 0; m < M; ++m) acc[m] = fma(s.m, splat(x.scaled_sum[b * M + m]), acc[m]);
  }
  for (int m = 0; m < M; ++m) store(out + m * out_stride, acc[m]);
}

// ── two panels, some blocks of them expanded to bytes and floats in the first-level cache, used by many tiles ──
inline constexpr int kChunk = 24;  // most blocks expanded at once: 24 KB

struct Expanded {
  const uint8_t* bytes[2];  // [block][8][64]
  const float* d[2];        // [block (x 2)][16]
  const float* m[2];        // [block][16]
};
struct ChunkScratch {
  alignas(64) uint8_t bytes[2][kChunk * 512];
  alignas(64) float d[2][2 * kChunk * kPanel];
  alignas(64) float m[2][kChunk * kPanel];
};

template <Kind K>
void expand_panel(const Matrix& w, int panel, int first, int blocks, int slot, ChunkScratch& scratch, Expanded& to) {
  const uint8_t* scales = w.panel(panel) + w.scales_at;
  const uint8_t* payload = w.panel(panel) + first * payload_bytes(K);
  float* d = scratch.d[slot];
  float* m = scratch.m[slot];
  uint8_t* bytes = scratch.bytes[slot];
  to.d[slot] = d;
  to.m[slot] = m;
  to.bytes[slot] = K == Kind::Q8_0 ? payload : bytes;
  for (int b = 0; b < blocks; ++b, payload += payload_bytes(K)) {
    const BlockScales s = read_scales<K>(scales, first + b);
    if constexpr (has_halves(K)) {
      store(d + (2 * b) * kPanel, s.d[0]);
      store(d + (2 * b + 1) * kPanel, s.d[1]);
    } else {
      store(d + b * kPanel, s.d[0]);
    }
    if constexpr (has_min(K)) store(m + b * kPanel, s.m);
    if constexpr (K != Kind::Q8_0)
      unroll<8>([&](auto step) {
        constexpr int group = decltype(step)::value;
        store_bytes(bytes + b * 512 + 64 * group, unpack_group<payload_bits(K), group>(payload));
      });
  }
}

// What integer sums begin with, for all blocks of all tiles: -offset * sum(x).
template <Kind K>
void make_starts(const QuantRows& x, int tile, int tile_end, int32_t* starts) {
  constexpr size_t per_block = has_halves(K) ? 2 : 1;
  const int32_t* sums = has_halves(K) ? x.negative_halves : x.negative_sum;
  const size_t begin = x.start(tile) * per_block;
  const size_t end = tile_end >= x.tiles() ? static_cast<size_t>(x.rows) * x.blocks * per_block : x.start(tile_end) * per_block;
  for (size_t i = begin; i < end; ++i) starts[i - begin] = sums[i] * (1 << std::max(0, zero_shift(K)));
}

// Memory that will be wanted next, asked for a few lines per block while the arithmetic goes on.
struct Ahead {
  const uint8_t* at = nullptr;
  int lines_per_block = 0;
};

// M rows x N panels over `blocks` blocks. `out` holds the sums of the blocks before, unless these are the first.
template <Kind K, int M, int N>
void wide_tile(const Expanded& w, int blocks, TileRows x, const int32_t* starts, Ahead& ahead, bool is_first, float* out,
               size_t out_stride) {
  constexpr int halves = has_halves(K) ? 2 : 1;
  const int row_bytes = x.parts * kBlock;
  const uint8_t* bytes[N];
  const float* d[N];
  const float* minimum[N];
  for (int n = 0; n < N; ++n) {
    bytes[n] = w.bytes[n];
    d[n] = w.d[n];
    minimum[n] = w.m[n];
  }
  Floats acc[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) acc[m][n] = is_first ? zeros() : load(out + m * out_stride + n * kPanel);
  const uint8_t* wanted = ahead.at;
  for (int b = 0; b < blocks; ++b) {
    for (int line = 0; line < ahead.lines_per_block; ++line, wanted += 64) prefetch_far(wanted);
    unroll<halves>([&](auto half) {
      constexpr int h = decltype(half)::value;
      Ints dot[M][N];
      const auto start = [&](int m) { return splat_int(zero_shift(K) < 0 ? 0 : starts[h * M + m]); };
      const auto add_part = [&](const int8_t* q) __attribute__((always_inline)) {
        unroll<8 / halves>([&](auto step) {
          constexpr int group = decltype(step)::value + h * 4;
          Bytes weights[N];
          for (int n = 0; n < N; ++n) weights[n] = load_bytes(bytes[n] + 64 * group);
          for (int m = 0; m < M; ++m) {
            const Inputs in = splat_inputs(q + m * row_bytes + 4 * group);
            for (int n = 0; n < N; ++n) dot[m][n] = dot4<payload_bits(K) == 8>(dot[m][n], weights[n], in);
          }
        });
      };
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) dot[m][n] = x.parts == 1 ? start(m) : splat_int(0);
      add_part(x.q);
      if (x.parts == 2) {
        for (int m = 0; m < M; ++m)
          for (int n = 0; n < N; ++n) dot[m][n] = add(shift_left(dot[m][n], 8), start(m));
        add_part(x.q + kBlock);
      }
      Floats scale[N];
      for (int n = 0; n < N; ++n) scale[n] = load(d[n] + h * kPanel);
      for (int m = 0; m < M; ++m) {
        const Floats s = splat(x.scale[m]);
        for (int n = 0; n < N; ++n) acc[m][n] = fma(to_floats(dot[m][n]), mul(scale[n], s), acc[m][n]);
      }
    });
    if constexpr (has_min(K)) {
      Floats low[N];
      for (int n = 0; n < N; ++n) low[n] = load(minimum[n]);
      for (int m = 0; m < M; ++m) {
        const Floats s = splat(x.scaled_sum[m]);
        for (int n = 0; n < N; ++n) acc[m][n] = fma(low[n], s, acc[m][n]);
      }
      x.scaled_sum += M;
      for (int n = 0; n < N; ++n) minimum[n] += kPanel;
    }
    x.q += M * row_bytes;
    x.scale += M;
    starts += halves * M;
    for (int n = 0; n < N; ++n) {
      bytes[n] += 512;
      d[n] += halves * kPanel;
    }
  }
  ahead.at = wanted;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(out + m * out_stride + n * kPanel, acc[m][n]);
}

// ── choosing a tile at run time ──
template <int Most, class Body>
inline void with_count(int count, Body body) {  // body(integral_constant) for count in 1..Most
  unroll<Most>([&](auto step) {
    constexpr int value = decltype(step)::value + 1;
    if (count == value) body(std::integral_constant<int, value>{});
  });
}

// The part of the next panels that the tiles of this chunk should fetch: as large a share as the chunk is of all blocks.
inline Ahead share_ahead(const Matrix& w, int next, int count, int first, int blocks, int tiles) {
  if (next + count > w.panels) return {};
  const size_t lines = static_cast<size_t>(count) * w.panel_bytes / 64;
  const size_t from = lines * first / w.blocks, to = lines * (first + blocks) / w.blocks;
  const size_t steps = static_cast<size_t>(tiles) * blocks;
  return {w.panel(next) + 64 * from, static_cast<int>((to - from + steps - 1) / steps)};
}

template <Kind K>
void linear_quantised(const Matrix& w, const QuantRows& x, int panel, int count, int tile, int tile_end, float* out,
                      size_t out_stride, uint8_t* scratch) {
  if (x.rows <= kSmallRows) {
    for (int n = 0; n < count; ++n)
      with_count<kSmallRows>(x.rows, [&](auto m) {
        small_tile<K, decltype(m)::value>(w, panel + n, TileRows(x, 0), out + n * kPanel, out_stride);
      });
    return;
  }
  auto& chunk = *reinterpret_cast<ChunkScratch*>(scratch);
  auto* starts = reinterpret_cast<int32_t*>(scratch + sizeof(ChunkScratch));
  if constexpr (zero_shift(K) >= 0) make_starts<K>(x, tile, tile_end, starts);
  const int chunks = (w.blocks + kChunk - 1) / kChunk, even = (w.blocks + chunks - 1) / chunks;
  for (int first = 0; first < w.blocks; first += even) {
    const int blocks = std::min(even, w.blocks - first);
    Expanded expanded{};
    for (int n = 0; n < count; ++n) expand_panel<K>(w, panel + n, first, blocks, n, chunk, expanded);
    Ahead ahead = share_ahead(w, panel + count, count, first, blocks, tile_end - tile);
    for (int t = tile; t < tile_end; ++t) {
      float* to = out + static_cast<size_t>(t - tile) * x.tile * out_stride;
      const size_t at = (x.start(t) - x.start(tile) + static_cast<size_t>(first) * x.rows_in(t)) * (has_halves(K) ? 2 : 1);
      with_count<kTileRows>(x.rows_in(t), [&](auto m) {
        constexpr int rows = decltype(m)::value;
        const TileRows in(x, t, first);
        if (count == 2) wide_tile<K, rows, 2>(expanded, blocks, in, starts + at, ahead, first == 0, to, out_stride);
        else wide_tile<K, rows, 1>(expanded, blocks, in, starts + at, ahead, first == 0, to, out_stride);
      });
    }
  }
}

// ── plain matrices: one fused multiply-add per input, in the order of the inputs ──
template <Kind K>
inline __attribute__((always_inline)) Floats load_plain(const uint8_t* panel, int k) {
  const size_t at = static_cast<size_t>(k) * kPanel;
  if constexpr (K == Kind::F32) return load(reinterpret_cast<const float*>(panel) + at);
  else if constexpr (K == Kind::F16) return load_half(reinterpret_cast<const uint16_t*>(panel) + at);
  else return load_bfloat(reinterpret_cast<const uint16_t*>(panel) + at);
}

template <Kind K, int M, int N>
void plain_tile(const Matrix& w, int panel, const float* x, size_t stride, float* out, size_t out_stride) {
  const uint8_t* weights[N];
  for (int n = 0; n < N; ++n) weights[n] = w.panel(panel + n);
  Floats acc[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) acc[m][n] = zeros();
  for (int k = 0; k < w.cols; ++k) {
    Floats column[N];
    for (int n = 0; n < N; ++n) column[n] = load_plain<K>(weights[n], k);
    for (int m = 0; m < M; ++m) {
      const Floats in = splat(x[m * stride + k]);
      for (int n = 0; n < N; ++n) acc[m][n] = fma(column[n], in, acc[m][n]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(out + m * out_stride + n * kPanel, acc[m][n]);
}

template <Kind K>
void linear_plain(const Matrix& w, const Rows& x, int panel, int count, int tile, int tile_end, float* out,
                  size_t out_stride) {
  const int row = tile * x.quant.tile, end = std::min(x.quant.rows, tile_end * x.quant.tile);
  for (int r = row; r < end; r += kSmallRows) {
    with_count<kSmallRows>(std::min(kSmallRows, end - r), [&](auto m) {
      constexpr int rows = decltype(m)::value;
      const float* in = x.values + static_cast<size_t>(r) * x.stride;
      float* to = out + static_cast<size_t>(r - row) * out_stride;
      if (count == 2) plain_tile<K, rows, 2>(w, panel, in, x.stride, to, out_stride);
      else plain_tile<K, rows, 1>(w, panel, in, x.stride, to, out_stride);
    });
  }
}

template <class Body>
inline void with_kind(Kind kind, Body body) {
  switch (kind) {
    case Kind::Q8_0: return body(std::integral_constant<Kind, Kind::Q8_0>{});
    case Kind::Q4_0: return body(std::integral_constant<Kind, Kind::Q4_0>{});
    case Kind::Q5_0: return body(std::integral_constant<Kind, Kind::Q5_0>{});
    case Kind::Q4_1: return body(std::integral_constant<Kind, Kind::Q4_1>{});
    case Kind::Q5_1: return body(std::integral_constant<Kind, Kind::Q5_1>{});
    case Kind::Q4_K: return body(std::integral_constant<Kind, Kind::Q4_K>{});
    case Kind::Q5_K: return body(std::integral_constant<Kind, Kind::Q5_K>{});
    case Kind::Q6_K: return body(std::integral_constant<Kind, Kind::Q6_K>{});
    case Kind::F32: return body(std::integral_constant<Kind, Kind::F32>{});
    case Kind::F16: return body(std::integral_constant<Kind, Kind::F16>{});
    case Kind::BF16: return body(std::integral_constant<Kind, Kind::BF16>{});
  }
}

inline size_t linear_scratch_bytes(const Matrix& w) {
  if (!is_quantised(w.kind)) return 0;
  return sizeof(ChunkScratch) + sizeof(int32_t) * 2 * kTilesPerCall * kTileRows * static_cast<size_t>(w.blocks);
}

inline void linear(const Matrix& w, const Rows& x, int panel, int count, int tile, int tile_end, float* out,
                   size_t out_stride, uint8_t* scratch) {
  with_kind(w.kind, [&](auto kind) {
    constexpr Kind K = decltype(kind)::value;
    if constexpr (is_quantised(K)) linear_quantised<K>(w, x.quant, panel, count, tile, tile_end, out, out_stride, scratch);
    else linear_plain<K>(w, x, panel, count, tile, tile_end, out, out_stride);
  });
}

// ── one row of a packed matrix as floats (embedding lookup) ──
template <Kind K>
void embed_quantised(const Matrix& w, int row, float scale, float* out) {
  const uint8_t* payload = w.panel(row / kPanel);
  const uint8_t* scales = payload + w.scales_at;
  const int lane = row % kPanel;
  const float zero = zero_shift(K) < 0 ? 0.0f : static_cast<float>(1 << (zero_shift(K) < 0 ? 0 : zero_shift(K)));
  float d[2][16], m[16];
  uint8_t bytes[512];
  for (int b = 0; b < w.blocks; ++b, payload += payload_bytes(K)) {
    const BlockScales s = read_scales<K>(scales, b);
    store(d[0], s.d[0]);
    store(d[1], has_halves(K) ? s.d[1] : s.d[0]);
    store(m, has_min(K) ? s.m : zeros());
    unroll<8>([&](auto step) {
      constexpr int group = decltype(step)::value;
      store_bytes(bytes + 64 * group, unpack_group<payload_bits(K), group>(payload));
    });
    for (int k = 0; k < kBlock; ++k) {
      const float q = static_cast<float>(bytes[64 * (k / 4) + 4 * lane + k % 4]) - zero;
      out[b * kBlock + k] = (d[k / 16][lane] * q + m[lane]) * scale;
    }
  }
}

inline void embed(const Matrix& w, int row, float scale, float* out) {
  with_kind(w.kind, [&](auto kind) {
    constexpr Kind K = decltype(kind)::value;
    if constexpr (is_quantised(K)) {
      embed_quantised<K>(w, row, scale, out);
    } else {
      float lanes[kPanel];
      for (int k = 0; k < w.cols; ++k) {
        store(lanes, load_plain<K>(w.panel(row / kPanel), k));
        out[k] = lanes[row % kPanel] * scale;
      }
    }
  });
}

}  // namespace tokenmill::TM_ISA
