// Attention over one-byte keys and values, each vector with its own scale, by exact integer products:
//
//   score = (q . k) * scale of q * scale of k            q and w are quantised to 16 bits and multiplied byte by byte, so
//   sum   = (w . v) * scale of w, where                  the error is that of the cache; and a sum of integers is the same
//           w = weight * scale of v                      in any order, so results don't depend on tiles and chunks
//
//   keys   [16-token group][head_dim / 4][16 tokens][4]            values   [4-token group][value_dim][4 tokens]
//
// Values are stored with an offset of 128, because dot4 takes unsigned bytes; sums start at -128 * the sum of the other
// factor.
#pragma once

namespace tokenmill::TM_ISA {

inline constexpr float kMost8 = 127.0f, kMost16 = 127.0f * 256.0f;
inline constexpr float kLeast = 1e-30f;  // smaller magnitudes become 0, since their inverse would not be finite

// Quantises `size` numbers (a multiple of 32) to two bytes: the high ones are stored at `to`, the low ones `part_bytes`
// later. A NaN makes the scale NaN.
inline Rounded round_numbers(const float* x, int size, int8_t* to, size_t part_bytes) {
  Floats largest = zeros(), total = zeros();
  for (int i = 0; i < size; i += 16) {
    const Floats a = load(x + i);
    largest = max(largest, abs(a));
    total = add(total, a);
  }
  const float top = max_lanes(largest);
  const Floats inverse = splat(top > kLeast ? kMost16 / top : 0.0f);
  int32_t sum = 0;
  for (int i = 0; i < size; i += 32) {
    int32_t high[2], low[2];
    const TwoBytes a = two_bytes(to_ints(mul(load(x + i), inverse)));
    const TwoBytes b = two_bytes(to_ints(mul(load(x + i + 16), inverse)));
    store_numbers(a.high, b.high, to + i);
    store_numbers(a.low, b.low, to + part_bytes + i);
    sum_small(a.high, b.high, high[0], high[1]);
    sum_small(a.low, b.low, low[0], low[1]);
    sum += 256 * (high[0] + high[1]) + low[0] + low[1];
  }
  return {top * (1.0f / kMost16) + 0.0f * sum_lanes(total), -128 * sum};
}

// ── writing ──

// Quantises a vector to one byte per value, as in ops/reference/kv_rounding.py; returns its scale.
inline float round_vector(const float* x, int size, int8_t* to) {
  Floats largest = zeros(), total = zeros();
  in_vectors(size, x, [&](int, Floats a, int) {
    largest = max(largest, abs(a));
    total = add(total, a);
  });
  const float scale = max_lanes(largest) / kMost8 + 0.0f * sum_lanes(total);
  const Floats step = splat(scale > kLeast ? scale : kLeast);
  in_vectors(size, x, [&](int i, Floats a, int) { store_i8(to + i, to_ints(div(a, step))); });
  return scale;
}

inline void write_rounded(const PagedCache& cache, int64_t slot, int kv_head, const float* key, const float* value) {
  const int offset = static_cast<int>(slot % cache.block_size), head_dim = cache.head_dim, value_dim = cache.value_dim;
  const size_t block = static_cast<size_t>(slot / cache.block_size);
  const size_t first = static_cast<size_t>(kv_head) * cache.block_size;
  const size_t scale = block * cache.scale_stride + first + offset;
  int8_t numbers[kMaxHeadDim];
  cache.key_scales[scale] = round_vector(key, head_dim, numbers);
  auto* k = static_cast<uint8_t*>(cache.keys) + block * cache.key_stride + (first + offset / 16 * 16) * head_dim + offset % 16 * 4;
  for (int d = 0; d < head_dim; ++d) k[d / 4 * 64 + d % 4] = static_cast<uint8_t>(numbers[d] + 128);
  cache.value_scales[scale] = round_vector(value, value_dim, numbers);
  auto* v = static_cast<uint8_t*>(cache.values) + block * cache.value_stride + (first + offset / 4 * 4) * value_dim + offset % 4;
  for (int d = 0; d < value_dim; ++d) v[4 * d] = static_cast<uint8_t>(numbers[d] + 128);
}

// ── preparation of a tile of queries and of a segment ──

// Stores the queries' bytes in the order of a score tile: [kScoreQueries queries][head_dim / 4][part][query][4].
inline void round_queries(const Workspace& work, const float* const* q, int count, int head_dim, float scale) {
  const int size = (head_dim + 31) / 32 * 32;
  float padded_q[kMaxHeadDim];
  int8_t bytes[2 * kMaxHeadDim];
  for (int i = 0; i < count; ++i) {
    std::copy_n(q[i], head_dim, padded_q);
    std::fill(padded_q + head_dim, padded_q + size, 0.0f);
    work.rounded_q[i] = round_numbers(padded_q, size, bytes, kMaxHeadDim);
    work.rounded_q[i].scale *= scale;
    int8_t* to = work.q_bytes() + static_cast<size_t>(i / kScoreQueries) * 2 * kScoreQueries * head_dim;
    to += i % kScoreQueries * 4;
    for (int d = 0; d < head_dim; d += 4, to += 8 * kScoreQueries) {
      std::copy_n(bytes + d, 4, to);
      std::copy_n(bytes + kMaxHeadDim + d, 4, to + 4 * kScoreQueries);
    }
  }
}

// Gathers the scales of the keys [lo, hi) of a segment; those of others, which are undefined, become 0.
inline void gather_scales(const HeadCache& head, const float* scales, int segment, int lo, int hi, float* to) {
  for (int at = lo / 32 * 32; at < (hi + 31) / 32 * 32; at += 16) {
    const bool is_inside = at + 16 > lo && at < hi;
    store(to + at - segment,
          is_inside ? keep_lanes(load(scales + head.scale(at)), lo - at, hi - at, zeros()) : zeros());
  }
}
// Memory latency exceeds the time of a pair of groups: each pair prefetches keys this far ahead, and the start of a segment
// is prefetched in the segment before.
inline constexpr int kKeysAhead = 96;

inline void prefetch_rounded(const HeadCache& head, int from, int to) {
  const auto* keys = static_cast<const uint8_t*>(head.cache.keys);
  from = from / 16 * 16;
  for (int at = from; at < std::min(to, from + kSegment); at += 16) {
    prefetch(head.cache.key_scales + head.scale(at));
    prefetch(head.cache.value_scales + head.scale(at));
    if (at >= from + kKeysAhead) continue;
    for (int byte = 0; byte < 16 * head.cache.head_dim; byte += 64) prefetch_far(keys + head.group16(at) + byte);
  }
  asm volatile("");  // otherwise GCC considers this function empty and drops the call
}

// ── scores: M queries x two groups of 16 keys ──
template <int M, bool Fetch>
void score_rounded_tile(const KeyPair<uint8_t>& pair, const int8_t* q, const Rounded* queries, const float* scales,
                        int head_dim, float* out) {
  Ints dot[M][2];
  if constexpr (Fetch)  // here, because GCC drops it in the lambda
    for (int d = 0; d < head_dim; d += 4)
      for (int n = 0; n < 2; ++n) {
        prefetch(pair.next[n] + 16 * d);
        prefetch_far(pair.values[n] + 16 * d);
      }
  const auto add_part = [&](const int8_t* in) __attribute__((always_inline)) {
    for (int d = 0; d < head_dim; d += 4, in += 8 * kScoreQueries) {
      const Bytes a = load_bytes(pair.keys[0] + 16 * d), b = load_bytes(pair.keys[1] + 16 * d);
      for (int m = 0; m < M; ++m) {
        const Inputs x = splat_inputs(in + 4 * m);
        dot[m][0] = dot4<true>(dot[m][0], a, x);
        dot[m][1] = dot4<true>(dot[m][1], b, x);
      }
    }
  };
  for (int m = 0; m < M; ++m) dot[m][0] = dot[m][1] = splat_int(0);
  add_part(q);
  for (int m = 0; m < M; ++m)
    for (Ints& half : dot[m]) half = add(shift_left(half, 8), splat_int(queries[m].start));
  add_part(q + 4 * kScoreQueries);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 2; ++n)
      store(out + m * kSegment + 16 * n, mul(to_floats(dot[m][n]), mul(splat(queries[m].scale), load(scales + 16 * n))));
}

inline void score_rounded(const HeadCache& head, const Workspace& work, int count, int segment, int lo, int hi) {
  const int head_dim = head.cache.head_dim;
  gather_scales(head, head.cache.key_scales, segment, lo, hi, work.scales);
  for (int at = lo / 32 * 32; at < hi; at += 32) {
    const auto pair = key_pair<Store::I8>(head, at, lo, hi, kKeysAhead);
    const float* scales = work.scales + (at - segment);
    for (int first = 0; first < count; first += kScoreQueries)
      with_count<kScoreQueries>(std::min(kScoreQueries, count - first), [&](auto m) {
        constexpr int rows = decltype(m)::value;
        const int8_t* q = work.q_bytes() + static_cast<size_t>(first) * 2 * head_dim;
        float* out = work.scores + first * kSegment + (at - segment);
        const Rounded* queries = work.rounded_q + first;
        if (count <= kScoreQueries) score_rounded_tile<rows, true>(pair, q, queries, scales, head_dim, out);
        else score_rounded_tile<rows, false>(pair, q, queries, scales, head_dim, out);
      });
  }
}

// ── sums: M queries x N vectors of a head, groups of 16 keys [lo, hi) of the segment ──
struct ValueGroups {
  const uint8_t* at[kSegment / 16];
  size_t stride;  // bytes between groups of four tokens
};

template <int M, int N>
void value_rounded_tile(const ValueGroups& values, size_t column, const int8_t* weights, const Rounded* rounded, int lo,
                        int hi, float* out, size_t out_stride) {
  Ints dot[M][N];
  const auto add_part = [&](const int8_t* w) __attribute__((always_inline)) {
    for (int group = lo; group < hi; ++group) {
      const uint8_t* v = values.at[group] + 4 * column;
      for (int quad = 0; quad < 4; ++quad, v += values.stride) {
        Bytes part[N];
        for (int n = 0; n < N; ++n) part[n] = load_bytes(v + 64 * n);
        for (int m = 0; m < M; ++m) {
          const Inputs x = splat_inputs(w + m * 2 * kSegment + 16 * group + 4 * quad);
          for (int n = 0; n < N; ++n) dot[m][n] = dot4<true>(dot[m][n], part[n], x);
        }
      }
    }
  };
  each_sum<M, N>([&](int m, int n) { dot[m][n] = splat_int(0); });
  add_part(weights);
  each_sum<M, N>([&](int m, int n) { dot[m][n] = add(shift_left(dot[m][n], 8), splat_int(rounded[m].start)); });
  add_part(weights + kSegment);
  each_sum<M, N>([&](int m, int n) {
    store(out + m * out_stride + 16 * n, mul(to_floats(dot[m][n]), splat(rounded[m].scale)));
  });
}

// Quantises every query's weights times the values' scales to two bytes: [query][part][kSegment].
inline void round_weights(const Workspace& work, int count, int lo, int hi) {
  const int from = lo / 32 * 32, size = (hi + 31) / 32 * 32 - from;
  for (int i = 0; i < count; ++i) {
    float* w = work.scores + i * kSegment;
    for (int at = from; at < from + size; at += 16) store(w + at, mul(load(w + at), load(work.scales + at)));
    work.rounded_w[i] = round_numbers(w + from, size, work.weight_bytes + i * 2 * kSegment + from, kSegment);
  }
}

// Returns the values of a segment; heads whose size is not a multiple of 16 are copied and zero-padded.
inline ValueGroups value_groups(const HeadCache& head, const Workspace& work, int segment, int lo, int hi) {
  const int value_dim = head.cache.value_dim, wide = padded(value_dim);
  const auto* values = static_cast<const uint8_t*>(head.cache.values);
  ValueGroups found{{}, 4 * static_cast<size_t>(wide)};
  for (int group = lo / 16; group * 16 < hi; ++group) {
    const uint8_t* at = values + head.value(segment + 16 * group);
    found.at[group] = at;
    if (value_dim == wide) continue;
    uint8_t* to = reinterpret_cast<uint8_t*>(work.widened) + static_cast<size_t>(16 * group) * wide;
    found.at[group] = to;
    for (int quad = 0; quad < 4; ++quad, at += 4 * value_dim, to += 4 * wide)
      std::fill(std::copy_n(at, 4 * value_dim, to), to + 4 * wide, uint8_t{0});
  }
  return found;
}

inline void sum_rounded(const HeadCache& head, const Workspace& work, int count, int segment, int lo, int hi) {
  const int wide = padded(head.cache.value_dim);
  gather_scales(head, head.cache.value_scales, segment, lo + segment, hi + segment, work.scales);
  round_weights(work, count, lo, hi);
  const ValueGroups values = value_groups(head, work, segment, lo, hi);
  for (int column = 0; column < wide; column += 16 * kValueVectors)
    with_count<kValueVectors>(std::min(kValueVectors, (wide - column) / 16), [&](auto n) {
      for (int first = 0; first < count; first += kValueQueries)
        with_count<kValueQueries>(std::min(kValueQueries, count - first), [&](auto m) {
          value_rounded_tile<decltype(m)::value, decltype(n)::value>(
              values, static_cast<size_t>(column), work.weight_bytes + first * 2 * kSegment, work.rounded_w + first,
              lo / 16, (hi + 15) / 16, work.sums + first * wide + column, wide);
        });
    });
}

}  // namespace tokenmill::TM_ISA
