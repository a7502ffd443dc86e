// y = W x for packed matrices. Per block of 32 inputs the int8 dot product is exact, followed by one multiply of the two
// scales and one fused multiply-add. Every tile computes an output in the same order, so a row's result has the same bits
// whether it is computed alone or among hundreds:
//
//   acc = fma(float(dot), w_scale * x_scale, acc);  with minima also  acc = fma(w_min, x_scaled_sum, acc)
//
// Weights are unsigned and activations signed: the offset of the weights is corrected by starting the integer sum at
// -offset * sum(x), computed when x is quantised. Blocks are processed in chunks; after each chunk the remainders of its
// blocks in the tile's list are added in the same way. A row without a remainder adds a zero there.
#pragma once
#include <algorithm>
#include <array>
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

// Calls body(m, n) for a tile's rows and panels, unrolled so that arrays of sums become registers.
template <int M, int N, class Body>
inline __attribute__((always_inline)) void each_sum(Body body) {
  unroll<M * N>([&](auto step) { body(decltype(step)::value / N, decltype(step)::value % N); });
}

// ── one block of packed weights ──
template <Kind K, int Group, int Part = 0>
inline __attribute__((always_inline)) Bytes unpack_group(const Matrix& w, const uint8_t* p) {
  constexpr int Bits = payload_bits(K);
  if constexpr (Bits == 8) return load_bytes(p + 64 * Group);
  if constexpr (Bits < 4) {
    const Bytes pairs = bit_pairs<Group % 4>(load_bytes(p + 64 * (Group / 4)));
    if constexpr (Bits == 3) return add_bits<4>(pairs, p + 128 + 8 * Group);
    else return pairs;
  }
  const Bytes both = load_bytes(p + 64 * (Group % 4));
  Bytes low = Group < 4 ? low_nibbles(both) : high_nibbles(both);
  if constexpr (Bits == 5) low = add_bits<16>(low, p + 256 + 8 * Group);
  if constexpr (Bits == 6) low = add_bit_pair<Group % 4>(low, load_bytes(p + 256 + 64 * (Group / 4)));
  if constexpr (has_table(K)) low = look_up(low, Part == 0 ? w.table->numbers : w.table->finer);
  return low;
}

struct BlockScales {  // the second ones are used only with a scale per 16 inputs
  Floats d[2];
  Floats m[2];
};

template <Kind K, int Part = 0>
inline __attribute__((always_inline)) BlockScales read_scales(const Matrix& w, const uint8_t* scales, int block) {
  BlockScales out{};
  const auto half = [](const uint8_t* p) { return load_half(reinterpret_cast<const uint16_t*>(p)); };
  if constexpr (has_supers(K)) {
    const uint8_t* base = scales + (block / kSuper) * scale_bytes(K);
    const int j = block % kSuper;
    if constexpr (K == Kind::Q6_K || K == Kind::Q3_K) {
      out.d[0] = mul(half(base), load_i8(base + 32 + 32 * j));
      out.d[1] = mul(half(base), load_i8(base + 48 + 32 * j));
    } else if constexpr (K == Kind::Q2_K) {
      unroll<2>([&](auto step) {
        constexpr int h = decltype(step)::value;
        const Floats both = load_u8(base + 64 + 16 * (2 * j + h));  // 16 * minimum + scale
        const Floats high = round_even(fma(both, splat(1.0f / 16.0f), splat(-15.0f / 32.0f)));
        out.d[h] = mul(half(base), fma(high, splat(-16.0f), both));
        out.m[h] = mul(sub(zeros(), half(base + 32)), high);
      });
    } else if constexpr (K == Kind::IQ4_XS) {
      out.d[0] = mul(half(base), load_i8(base + 32 + 16 * j));
    } else {
      out.d[0] = mul(half(base), load_u8(base + 64 + 16 * j));
      out.m[0] = mul(sub(zeros(), half(base + 32)), load_u8(base + 192 + 16 * j));
    }
  } else if constexpr (K == Kind::NV4) {
    const Floats of_row = load(reinterpret_cast<const float*>(scales));
    const uint8_t* base = scales + 64 + block * scale_bytes(K);
    out.d[0] = mul(of_row, load_e4m3(base));
    out.d[1] = mul(of_row, load_e4m3(base + 16));
  } else if constexpr (has_groups(K)) {
    const auto* base = reinterpret_cast<const float*>(scales + block / w.group * scale_bytes(K));
    out.d[0] = load(base);
    if constexpr (Part == 1) out.d[0] = mul(out.d[0], splat(1.0f / 256.0f));
    if constexpr (has_min(K)) out.m[0] = mul(sub(zeros(), out.d[0]), load(base + 16));
  } else {
    const uint8_t* base = scales + block * scale_bytes(K);
    if constexpr (K == Kind::MXFP4) out.d[0] = load_bfloat(reinterpret_cast<const uint16_t*>(base));
    else out.d[0] = half(base);
    if constexpr (has_min(K)) out.m[0] = half(base + 32);
  }
  return out;
}

// Blocks per chunk: as many as are expanded at a time in the L1 cache, 24 KB of two panels.
inline constexpr int kChunk = 24;

inline int chunk_of(int blocks) {  // chunks of even size
  const int chunks = (blocks + kChunk - 1) / kChunk;
  return (blocks + chunks - 1) / chunks;
}

// The sum of 16 inputs, from the stored -32 * the sum of their integers.
inline __attribute__((always_inline)) float half_sum(float scale, int32_t kept) {
  return scale * (static_cast<float>(kept) * (-1.0f / 32.0f));
}

// ── activations of a tile of M rows: one block of them, and the blocks of a chunk in the order they are added ──
template <Kind K, int M>
struct Record {
  const uint8_t* at;

  template <int Field>
  inline __attribute__((always_inline)) const void* field() const { return at + Field * 4 * M; }
  const float* scale() const { return static_cast<const float*>(field<0>()); }
  const float* scaled_sum() const { return static_cast<const float*>(field<1>()); }
  const int8_t* numbers() const { return reinterpret_cast<const int8_t*>(at) + QuantRows::numbers_at(M); }
  // Start value of the integer sum of row m (of half h if there are two): -offset * sum(q).
  inline __attribute__((always_inline)) Ints start(int h, int m) const {
    if constexpr (zero_shift(K) < 0) return splat_int(0);
    constexpr int at_field = has_halves(K) ? 4 : zero_shift(K) == 7 ? 2 : 3;
    constexpr int stored_shift = has_halves(K) ? 5 : zero_shift(K) == 7 ? 7 : 3;
    const Ints found = splat_int(static_cast<const int32_t*>(field<at_field>())[h * M + m]);
    if constexpr (zero_shift(K) > stored_shift) return shift_left(found, zero_shift(K) - stored_shift);
    else if constexpr (zero_shift(K) < stored_shift) return shift_right(found, stored_shift - zero_shift(K));
    else return found;
  }
  // Factor of the minima for row m: the sum of its inputs, or of half h of them.
  inline __attribute__((always_inline)) float sum(int h, int m) const {
    if constexpr (!has_halves(K)) return scaled_sum()[m];
    else return half_sum(scale()[m], static_cast<const int32_t*>(field<4>())[h * M + m]);
  }
};

struct Pass {  // some blocks of a chunk: the i-th is blocks[i] - from, counted from the chunk's first
  const uint8_t* records;
  const uint16_t* blocks;
  int from, count;
};

inline constexpr auto kInOrder = [] {
  std::array<uint16_t, kChunk> order{};
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint16_t>(i);
  return order;
}();

template <Kind K, int M>
struct TileChunk {
  const uint8_t* records;  // of the chunk's first block
  size_t remainder_at;
  const uint16_t* listed = nullptr;  // blocks of the chunk with remainders, counted from the first block of the row
  int first, blocks, num_listed = 0;

  TileChunk(const QuantRows& rows, int t, int from, int count)
      : records(rows.record(t, from)), remainder_at(rows.remainder_at), first(from), blocks(count) {
    if (remainder_at == 0 || *rows.list(t) == 0) return;
    const uint16_t* list = rows.list(t);
    listed = std::lower_bound(list + 1, list + 1 + *list, from);
    num_listed = static_cast<int>(std::lower_bound(listed, list + 1 + *list, from + count) - listed);
  }
  // First all blocks, then the listed ones' remainders. (Two loops of known length have well-predicted branches.)
  static constexpr int kPasses = 2;
  Pass pass(int number) const {
    if (number == 0) return {records, kInOrder.data(), 0, blocks};
    return {records + remainder_at, listed, first, num_listed};
  }
  int steps() const { return blocks + num_listed; }
  // The block of step i, counted from the chunk's first, and its record.
  inline __attribute__((always_inline)) int block(int i) const { return i < blocks ? i : listed[i - blocks] - first; }
  inline __attribute__((always_inline)) Record<K, M> record(int i, int block) const {
    return {records + (i < blocks ? 0 : remainder_at) + static_cast<size_t>(block) * QuantRows::record_bytes(M)};
  }
};

// ── M rows x one panel, directly from the packed form: for few rows, bound by reading the weights ──
template <Kind K, int M>
void small_tile(const Matrix& w, int panel, const QuantRows& x, bool onto, float* out, size_t out_stride) {
  constexpr int halves = has_halves(K) ? 2 : 1;
  const uint8_t* scales = w.panel(panel) + w.scales_at;
  Floats acc[M];
  for (int m = 0; m < M; ++m) acc[m] = onto ? load(out + m * out_stride) : zeros();
  const int even = chunk_of(w.blocks);
  for (int first = 0; first < w.blocks; first += even) {
    const TileChunk<K, M> chunk(x, 0, first, std::min(even, w.blocks - first));
    unroll<num_tables(K)>([&](auto which) {
      constexpr int part = decltype(which)::value;
      for (int i = 0; i < chunk.steps(); ++i) {
        const int b = chunk.block(i);
        const Record<K, M> in = chunk.record(i, b);
        const uint8_t* payload = w.panel(panel) + (first + b) * payload_bytes(K);
        for (size_t ahead = 0; ahead < payload_bytes(K); ahead += 64) prefetch(payload + 4096 + ahead);
        const BlockScales s = read_scales<K, part>(w, scales, first + b);
        unroll<halves>([&](auto half) {
          constexpr int h = decltype(half)::value;
          Ints dot[M];
          for (int m = 0; m < M; ++m) dot[m] = in.start(h, m);
          unroll<8 / halves>([&](auto step) {
            constexpr int group = decltype(step)::value + h * 4;
            const Bytes weights = unpack_group<K, group, part>(w, payload);
            for (int m = 0; m < M; ++m)
              dot[m] = dot4<is_wide(K)>(dot[m], weights, splat_inputs(in.numbers() + m * kBlock + 4 * group));
          });
          for (int m = 0; m < M; ++m) acc[m] = fma(to_floats(dot[m]), mul(s.d[h], splat(in.scale()[m])), acc[m]);
          if constexpr (has_min(K))
            for (int m = 0; m < M; ++m) acc[m] = fma(s.m[h], splat(in.sum(h, m)), acc[m]);
        });
      }
    });
  }
  for (int m = 0; m < M; ++m) store(out + m * out_stride, acc[m]);
}

// ── two panels, some blocks of which are expanded to bytes and floats in the L1 cache, for many tiles ──
struct Expanded {
  const uint8_t* bytes[2];  // [block][8][64]
  const float* d[2];        // [block (x 2)][16]
  const float* m[2];        // [block (x 2)][16]
};
struct ChunkScratch {
  alignas(64) uint8_t bytes[2][kChunk * 512];
  alignas(64) float d[2][2 * kChunk * kPanel];
  alignas(64) float m[2][2 * kChunk * kPanel];
};

template <Kind K, int Part = 0>
void expand_panel(const Matrix& w, int panel, int first, int blocks, int slot, ChunkScratch& scratch, Expanded& to) {
  const uint8_t* scales = w.panel(panel) + w.scales_at;
  const uint8_t* payload = w.panel(panel) + first * payload_bytes(K);
  float* d = scratch.d[slot];
  float* m = scratch.m[slot];
  uint8_t* bytes = scratch.bytes[slot];
  to.d[slot] = d;
  to.m[slot] = m;
  constexpr int halves = has_halves(K) ? 2 : 1;
  to.bytes[slot] = payload_bits(K) == 8 ? payload : bytes;
  for (int b = 0; b < blocks; ++b, payload += payload_bytes(K)) {
    const BlockScales s = read_scales<K, Part>(w, scales, first + b);
    for (int h = 0; h < halves; ++h) {
      store(d + (halves * b + h) * kPanel, s.d[h]);
      if constexpr (has_min(K)) store(m + (halves * b + h) * kPanel, s.m[h]);
    }
    if constexpr (payload_bits(K) != 8)
      unroll<8>([&](auto step) {
        constexpr int group = decltype(step)::value;
        store_bytes(bytes + b * 512 + 64 * group, unpack_group<K, group, Part>(w, payload));
      });
  }
}

// Memory to prefetch, a few cache lines per block during the arithmetic.
struct Ahead {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
  int bytes_per_block = 0;

  inline __attribute__((always_inline)) void fetch() {
    for (const uint8_t* stop = std::min(end, at + bytes_per_block); at < stop; at += 64) prefetch_far(at);
  }
};

// M rows x N panels over a chunk, added to `out` if `onto`. Loads are kept in place: a compiler that moves them to the top
// of a block would have no registers left for the sums.
template <Kind K, int M, int N>
void wide_tile(const Expanded& w, const TileChunk<K, M>& x, Ahead& ahead, bool onto, float* out, size_t out_stride) {
  constexpr int halves = has_halves(K) ? 2 : 1;
  Floats acc[M][N];
  each_sum<M, N>([&](int m, int n) { acc[m][n] = onto ? load(out + m * out_stride + n * kPanel) : zeros(); });
  Ahead own = ahead;
  for (int number = 0; number < x.kPasses; ++number) {
    const Pass pass = x.pass(number);
    for (int i = 0; i < pass.count; ++i) {
      const int b = pass.blocks[i] - pass.from;
      const Record<K, M> in{pass.records + static_cast<size_t>(b) * QuantRows::record_bytes(M)};
      own.fetch();
      unroll<halves>([&](auto half) {
        constexpr int h = decltype(half)::value;
        Ints dot[M][N];
        each_sum<M, N>([&](int m, int n) { dot[m][n] = in.start(h, m); });
        unroll<8 / halves>([&](auto step) {
          constexpr int group = decltype(step)::value + h * 4;
          Bytes weights[N];
          for (int n = 0; n < N; ++n) weights[n] = load_bytes_here(w.bytes[n] + 512 * b + 64 * group);
          unroll<M>([&](auto row) {
            constexpr int m = decltype(row)::value;
            const Inputs numbers = splat_inputs_here(in.numbers() + m * kBlock + 4 * group);
            for (int n = 0; n < N; ++n) dot[m][n] = dot4<is_wide(K)>(dot[m][n], weights[n], numbers);
          });
        });
        Floats scale[N];
        for (int n = 0; n < N; ++n) scale[n] = load(w.d[n] + (halves * b + h) * kPanel);
        each_sum<M, N>([&](int m, int n) {
          acc[m][n] = fma(to_floats(dot[m][n]), mul(scale[n], splat(in.scale()[m])), acc[m][n]);
        });
        if constexpr (has_min(K)) {
          Floats low[N];
          for (int n = 0; n < N; ++n) low[n] = load(w.m[n] + (halves * b + h) * kPanel);
          each_sum<M, N>([&](int m, int n) { acc[m][n] = fma(low[n], splat(in.sum(h, m)), acc[m][n]); });
        }
      });
    }
  }
  ahead = own;
  each_sum<M, N>([&](int m, int n) { store(out + m * out_stride + n * kPanel, acc[m][n]); });
}

// ── choosing a tile at run time ──
template <int Most, class Body>
inline void with_count(int count, Body body) {  // body(integral_constant) for count in 1..Most
  unroll<Most>([&](auto step) {
    constexpr int value = decltype(step)::value + 1;
    if (count == value) body(std::integral_constant<int, value>{});
  });
}

// The part of the next panels that the tiles of this chunk prefetch: in proportion to the chunk's share of all blocks.
inline Ahead share_ahead(const Matrix& w, int next, int count, int first, int blocks, int tiles) {
  if (next < 0 || next + count > w.panels) return {};
  const size_t lines = static_cast<size_t>(count) * w.panel_bytes / 64;
  const size_t from = lines * first / w.blocks, to = lines * (first + blocks) / w.blocks;
  const size_t steps = static_cast<size_t>(tiles) * blocks;
  return {w.panel(next) + 64 * from, w.panel(next) + 64 * to, 64 * static_cast<int>((to - from + steps - 1) / steps)};
}

// Prefetches the output of a tile.
inline void expect_sums(const float* out, size_t stride, int rows, int panels) {
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < panels; ++n) prefetch_to_write(out + m * stride + n * kPanel);
}

template <Kind K>
void linear_quantised(const Matrix& w, const QuantRows& x, const Span& span, const Sums& to, uint8_t* scratch) {
  if (x.rows <= kSmallRows) {
    for (int n = 0; n < span.panels; ++n)
      with_count<kSmallRows>(x.rows, [&](auto m) {
        constexpr int rows = decltype(m)::value;
        small_tile<K, rows>(w, span.panel + n, x, to.onto, to.out + n * kPanel, to.stride);
      });
    return;
  }
  auto& room = *reinterpret_cast<ChunkScratch*>(scratch);
  const int even = chunk_of(w.blocks);
  for (int first = 0; first < w.blocks; first += even) {
    const int blocks = std::min(even, w.blocks - first);
    expect_sums(to.out, to.stride, x.rows_in(span.tile), span.panels);
    unroll<num_tables(K)>([&](auto which) {
      constexpr int part = decltype(which)::value;
      const bool onto = to.onto || first > 0 || part > 0;
      Expanded expanded{};
      for (int n = 0; n < span.panels; ++n) expand_panel<K, part>(w, span.panel + n, first, blocks, n, room, expanded);
      Ahead ahead = share_ahead(w, part == 0 ? span.next : -1, span.panels, first, blocks, span.tile_end - span.tile);
      for (int t = span.tile; t < span.tile_end; ++t) {
        float* out = to.out + static_cast<size_t>(t - span.tile) * x.tile * to.stride;
        if (t + 1 < span.tile_end) expect_sums(out + x.tile * to.stride, to.stride, x.rows_in(t + 1), span.panels);
        with_count<kTileRows>(x.rows_in(t), [&](auto m) {
          constexpr int rows = decltype(m)::value;
          const TileChunk<K, rows> in(x, t, first, blocks);
          if (span.panels == 2) wide_tile<K, rows, 2>(expanded, in, ahead, onto, out, to.stride);
          else wide_tile<K, rows, 1>(expanded, in, ahead, onto, out, to.stride);
        });
      }
    });
  }
}

// ── unquantised matrices: one fused multiply-add per input, in the order of the inputs ──
template <Kind K>
inline __attribute__((always_inline)) Floats load_plain(const uint8_t* panel, int k) {
  const size_t at = static_cast<size_t>(k) * kPanel;
  if constexpr (K == Kind::F32) return load(reinterpret_cast<const float*>(panel) + at);
  else if constexpr (K == Kind::F16) return load_half(reinterpret_cast<const uint16_t*>(panel) + at);
  else if constexpr (K == Kind::F8) return load_e4m3(panel + at);
  else return load_bfloat(reinterpret_cast<const uint16_t*>(panel) + at);
}

// Loads the scales of a group of columns.
inline __attribute__((always_inline)) Floats plain_scales(const Matrix& w, int panel, int group) {
  return load(reinterpret_cast<const float*>(w.panel(panel) + w.scales_at) + static_cast<size_t>(group) * kPanel);
}

template <Kind K, int M, int N>
void plain_tile(const Matrix& w, int panel, const float* x, size_t stride, bool onto, float* out, size_t out_stride) {
  const uint8_t* weights[N];
  for (int n = 0; n < N; ++n) weights[n] = w.panel(panel + n);
  Floats acc[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) acc[m][n] = onto ? load(out + m * out_stride + n * kPanel) : zeros();
  constexpr bool is_scaled = K == Kind::F8;
  const int size = is_scaled ? kBlock * w.group : w.cols;  // columns that share a scale
  for (int first = 0; first < w.cols; first += size) {
    Floats scale[N];
    if constexpr (is_scaled)
      for (int n = 0; n < N; ++n) scale[n] = plain_scales(w, panel + n, first / size);
    for (int k = first; k < first + size; ++k) {
      Floats column[N];
      for (int n = 0; n < N; ++n) {
        column[n] = load_plain<K>(weights[n], k);
        if constexpr (is_scaled) column[n] = mul(column[n], scale[n]);
      }
      for (int m = 0; m < M; ++m) {
        const Floats in = splat(x[m * stride + k]);
        for (int n = 0; n < N; ++n) acc[m][n] = fma(column[n], in, acc[m][n]);
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(out + m * out_stride + n * kPanel, acc[m][n]);
}

template <Kind K>
void linear_plain(const Matrix& w, const Rows& x, const Span& span, const Sums& to) {
  const int row = span.tile * x.quant.tile, end = std::min(x.quant.rows, span.tile_end * x.quant.tile);
  for (int r = row; r < end; r += kSmallRows) {
    with_count<kSmallRows>(std::min(kSmallRows, end - r), [&](auto m) {
      constexpr int rows = decltype(m)::value;
      const float* in = x.values + static_cast<size_t>(r) * x.stride;
      float* out = to.out + static_cast<size_t>(r - row) * to.stride;
      if (span.panels == 2) plain_tile<K, rows, 2>(w, span.panel, in, x.stride, to.onto, out, to.stride);
      else plain_tile<K, rows, 1>(w, span.panel, in, x.stride, to.onto, out, to.stride);
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
    case Kind::MXFP4: return body(std::integral_constant<Kind, Kind::MXFP4>{});
    case Kind::IQ4_NL: return body(std::integral_constant<Kind, Kind::IQ4_NL>{});
    case Kind::IQ4_XS: return body(std::integral_constant<Kind, Kind::IQ4_XS>{});
    case Kind::Q2_K: return body(std::integral_constant<Kind, Kind::Q2_K>{});
    case Kind::Q3_K: return body(std::integral_constant<Kind, Kind::Q3_K>{});
    case Kind::G4: return body(std::integral_constant<Kind, Kind::G4>{});
    case Kind::G8: return body(std::integral_constant<Kind, Kind::G8>{});
    case Kind::T4: return body(std::integral_constant<Kind, Kind::T4>{});
    case Kind::NV4: return body(std::integral_constant<Kind, Kind::NV4>{});
    case Kind::F8: return body(std::integral_constant<Kind, Kind::F8>{});
    case Kind::F32: return body(std::integral_constant<Kind, Kind::F32>{});
    case Kind::F16: return body(std::integral_constant<Kind, Kind::F16>{});
    case Kind::BF16: return body(std::integral_constant<Kind, Kind::BF16>{});
  }
}

inline size_t linear_scratch_bytes(const Matrix& w) { return is_quantised(w.kind) ? sizeof(ChunkScratch) : 0; }

inline void linear(const Matrix& w, const Rows& x, const Span& span, const Sums& to, uint8_t* scratch) {
  with_kind(w.kind, [&](auto kind) {
    constexpr Kind K = decltype(kind)::value;
    if constexpr (is_quantised(K)) linear_quantised<K>(w, x.quant, span, to, scratch);
    else linear_plain<K>(w, x, span, to);
  });
}

// ── one row of a packed matrix as floats (embedding lookup) ──
template <Kind K>
void embed_quantised(const Matrix& w, int row, float scale, float* out) {
  const uint8_t* payload = w.panel(row / kPanel);
  const uint8_t* scales = payload + w.scales_at;
  const int lane = row % kPanel;
  const float zero = zero_shift(K) < 0 ? 0.0f : static_cast<float>(1 << (zero_shift(K) < 0 ? 0 : zero_shift(K)));
  float d[2][16], m[2][16];
  uint8_t bytes[512];
  for (int b = 0; b < w.blocks; ++b, payload += payload_bytes(K)) {
    const BlockScales s = read_scales<K>(w, scales, b);
    for (int h = 0; h < 2; ++h) {
      store(d[h], s.d[has_halves(K) ? h : 0]);
      store(m[h], has_min(K) ? s.m[has_halves(K) ? h : 0] : zeros());
    }
    unroll<8>([&](auto step) {
      constexpr int group = decltype(step)::value;
      store_bytes(bytes + 64 * group, unpack_group<K, group>(w, payload));
    });
    for (int k = 0; k < kBlock; ++k) {
      const float q = static_cast<float>(bytes[64 * (k / 4) + 4 * lane + k % 4]) - zero;
      out[b * kBlock + k] = (d[k / 16][lane] * q + m[k / 16][lane]) * scale;
    }
    if constexpr (num_tables(K) > 1) {
      unroll<8>([&](auto step) {
        constexpr int group = decltype(step)::value;
        store_bytes(bytes + 64 * group, unpack_group<K, group, 1>(w, payload));
      });
      for (int k = 0; k < kBlock; ++k) {
        const float q = static_cast<float>(bytes[64 * (k / 4) + 4 * lane + k % 4]) - zero;
        out[b * kBlock + k] += d[k / 16][lane] * (q / 256.0f) * scale;
      }
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
        Floats column = load_plain<K>(w.panel(row / kPanel), k);
        if constexpr (K == Kind::F8) column = mul(column, plain_scales(w, row / kPanel, k / (kBlock * w.group)));
        store(lanes, column);
        out[k] = lanes[row % kPanel] * scale;
      }
    }
  });
}

}  // namespace tokenmill::TM_ISA
