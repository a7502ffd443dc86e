// Attention over the paged cache. A tile of queries that share a kv head walks the context in segments of 256 keys:
//
//   scores [queries][256] = q . k        a register holds 16 tokens' keys, so a score needs no sum across lanes
//   weights = e^(score - largest)        masked keys get exactly 0
//   sums [queries][value_dim] = weights . v, then merged with the earlier segments (online softmax)
//
// Segments begin at absolute positions and keys are processed in order, so a query's result does not depend on the other
// queries of the tile, on how the prompt was chunked, or on which thread computed which segment. One-byte keys and values
// have separate code (attention_int8.h).
#pragma once
#include <limits>

namespace tokenmill::TM_ISA {

inline constexpr int kQueryTile = 24;
inline constexpr float kNever = -std::numeric_limits<float>::infinity();

template <Store S>
struct Stored;
template <>
struct Stored<Store::F32> {
  using Type = float;
  static Floats load16(const float* p) { return load(p); }
  static void store16(float* p, Floats a) { store(p, a); }
  static float get(float x) { return x; }
  static float put(float x) { return x; }
};
template <>
struct Stored<Store::F16> {
  using Type = uint16_t;
  static Floats load16(const uint16_t* p) { return load_half(p); }
  static void store16(uint16_t* p, Floats a) { store_half(p, a); }
  static float get(uint16_t x) { return half_to_float(x); }
  static uint16_t put(float x) { return float_to_half(x); }
};
template <>
struct Stored<Store::BF16> {
  using Type = uint16_t;
  static Floats load16(const uint16_t* p) { return load_bfloat(p); }
  static void store16(uint16_t* p, Floats a) {
    float lanes[16];
    store(lanes, a);
    for (int i = 0; i < 16; ++i) p[i] = put(lanes[i]);
  }
  static float get(uint16_t x) { return bfloat_to_float(x); }
  static uint16_t put(float x) { return float_to_bfloat(x); }
};
template <>
struct Stored<Store::I8> {
  using Type = uint8_t;
};

template <class Body>
inline void with_store(Store store, Body body) {
  switch (store) {
    case Store::F32: return body(std::integral_constant<Store, Store::F32>{});
    case Store::F16: return body(std::integral_constant<Store, Store::F16>{});
    case Store::BF16: return body(std::integral_constant<Store, Store::BF16>{});
    case Store::I8: return body(std::integral_constant<Store, Store::I8>{});
  }
}

inline int padded(int dim) { return (dim + 15) / 16 * 16; }

struct HeadCache {  // one KV head of the cache, addressed through a block table
  const PagedCache& cache;
  const int32_t* table;
  int kv_head;

  size_t block(int position) const { return static_cast<size_t>(table[position / cache.block_size]); }
  size_t token(int position) const {  // index among the tokens and heads of its block
    return static_cast<size_t>(kv_head) * cache.block_size + position % cache.block_size;
  }
  // Offset of the keys of a group of 16 tokens, which begins at this position.
  size_t group16(int position) const { return block(position) * cache.key_stride + token(position) * cache.head_dim; }
  size_t value(int position) const { return block(position) * cache.value_stride + token(position) * cache.value_dim; }
  size_t scale(int position) const { return block(position) * cache.scale_stride + token(position); }
};

struct Rounded {  // a quantised vector: its scale, and -128 * the sum of its integers
  float scale;
  int32_t start;
};

inline constexpr int kWidened = 32;  // keys or values converted to floats at a time, if many queries use them
inline constexpr int kNearValues = 64;  // values per iteration: they stay in the L1 cache
inline constexpr int kQueryStride = kMaxHeadDim + 16;  // of queries in the workspace; spreads them over cache sets

// The first segments of one KV head's context as floats, kept for the next tile of queries, since many tiles of a prompt
// read the same keys. Records how many of each segment's keys and values are converted.
inline constexpr int kKeptSegments = 4;

struct KeptHead {
  uint64_t of;  // the head: attend's `keys_id`
  int num_keys[kKeptSegments];
};

struct Workspace {  // "widest": the larger of the dimensions of a key and a value
  float* q;       // [kQueryTile][kQueryStride]
  float* scores;  // [kQueryTile][kSegment]
  float* sums;    // [kQueryTile][padded value_dim]
  float* widened;  // keys [2][head_dim][16] or values [kWidened][padded value_dim]; or values of one byte [kSegment][...]
  // ── for one-byte keys and values ──
  float* scales;         // [kSegment]
  Rounded* rounded_q;    // [kQueryTile]
  Rounded* rounded_w;    // [kQueryTile]
  int8_t* weight_bytes;  // [kQueryTile][2][kSegment]
  // ── for two-byte keys and values ──
  KeptHead* kept;
  float* kept_keys;    // [kKeptSegments][kSegment / 16][head_dim][16]
  float* kept_values;  // [kKeptSegments][kSegment][padded value_dim]

  Workspace(uint8_t* scratch, int widest) {
    const size_t wide = static_cast<size_t>(padded(widest));
    q = reinterpret_cast<float*>(scratch);
    scores = q + kQueryTile * kQueryStride;
    sums = scores + kQueryTile * kSegment;
    widened = sums + kQueryTile * wide;
    scales = widened + kSegment / 4 * wide;
    rounded_q = reinterpret_cast<Rounded*>(scales + kSegment);
    rounded_w = rounded_q + kQueryTile;
    weight_bytes = reinterpret_cast<int8_t*>(rounded_w + kQueryTile);
    kept = reinterpret_cast<KeptHead*>(weight_bytes + 2 * kQueryTile * kSegment);
    kept_keys = reinterpret_cast<float*>(kept) + kKeptHeadFloats;
    kept_values = kept_keys + kKeptSegments * kSegment * wide;
  }
  static constexpr size_t kKeptHeadFloats = 16;
  static_assert(sizeof(KeptHead) <= 4 * kKeptHeadFloats);
  int8_t* q_bytes() const { return reinterpret_cast<int8_t*>(q); }  // two per value, instead of `q`
  static size_t bytes(int widest) {
    const size_t wide = static_cast<size_t>(padded(widest));
    const size_t rounded = 4 * kSegment + kQueryTile * (2 * sizeof(Rounded) + 2 * kSegment);
    const size_t kept = 4 * (kKeptHeadFloats + 2 * kKeptSegments * kSegment * wide);
    return 4 * (kQueryTile * (kQueryStride + kSegment + wide) + kSegment / 4 * wide) + rounded + kept + 64;
  }
};

// For one-byte keys and values, see attention_int8.h.
inline void round_queries(const Workspace& work, const float* const* q, int count, int head_dim, float scale);
inline void prefetch_rounded(const HeadCache& head, int from, int to);
inline void score_rounded(const HeadCache& head, const Workspace& work, int count, int segment, int lo, int hi);
inline void sum_rounded(const HeadCache& head, const Workspace& work, int count, int segment, int lo, int hi);
inline void write_rounded(const PagedCache& cache, int64_t slot, int kv_head, const float* key, const float* value);

// Two groups of 16 keys, and what to prefetch meanwhile: two later groups, and the values of these keys.
template <class Cell>
struct KeyPair {
  const Cell* keys[2];
  const Cell* next[2];
  const Cell* values[2];
};

// ── scores: M queries x two groups of 16 keys ──
template <Store S, int M, bool Fetch>
void score_tile(const KeyPair<typename Stored<S>::Type>& pair, const float* q, int head_dim, float* out) {
  Floats acc[M][2];
  each_sum<M, 2>([&](int m, int n) { acc[m][n] = zeros(); });
  constexpr int per_line = static_cast<int>(4 / sizeof(typename Stored<S>::Type));  // numbers of 16 keys in a cache line
  for (int d = 0; d < head_dim; ++d) {
    if constexpr (Fetch)
      for (int n = 0; n < 2 && d % per_line == 0; ++n) {
        prefetch(pair.next[n] + 16 * d);
        prefetch_far(pair.values[n] + 16 * d);
      }
    const Floats a = Stored<S>::load16(pair.keys[0] + 16 * d), b = Stored<S>::load16(pair.keys[1] + 16 * d);
    unroll<M>([&](auto row) {
      constexpr int m = decltype(row)::value;
      const Floats in = splat(q[m * kQueryStride + d]);
      acc[m][0] = fma(a, in, acc[m][0]);
      acc[m][1] = fma(b, in, acc[m][1]);
    });
  }
  each_sum<M, 2>([&](int m, int n) { store(out + m * kSegment + 16 * n, acc[m][n]); });
}

template <Store S>
KeyPair<typename Stored<S>::Type> key_pair(const HeadCache& head, int at, int lo, int hi, int ahead = 32) {
  const auto* keys = static_cast<const typename Stored<S>::Type*>(head.cache.keys);
  const auto* values = static_cast<const typename Stored<S>::Type*>(head.cache.values);
  const auto within = [&](int position) {  // groups outside [lo, hi) are replaced by a neighbour; their lanes are masked
    return std::clamp(position, lo / 16 * 16, (hi - 1) / 16 * 16);
  };
  const auto group = [&](int position) { return keys + head.group16(within(position)); };
  return {{group(at), group(at + 16)},
          {group(at + ahead), group(at + ahead + 16)},
          {values + head.value(within(at)), values + head.value(within(at + 16))}};
}

// Converts values of the cache to floats; `count` is a multiple of 16.
template <Store S>
void widen(const typename Stored<S>::Type* from, int count, float* to) {
  for (int i = 0; i < count; i += 16) store(to + i, Stored<S>::load16(from + i));
}

template <Store S>
void narrow(const float* from, int count, typename Stored<S>::Type* to) {
  int i = 0;
  for (; i + 16 <= count; i += 16) Stored<S>::store16(to + i, load(from + i));
  for (; i < count; ++i) to[i] = Stored<S>::put(from[i]);
}

// Prefetches the next keys while this pair is computed.
template <class Cell>
void fetch_next(const KeyPair<Cell>& pair, int n, int head_dim) {
  for (int at = 0; at < 16 * head_dim; at += static_cast<int>(64 / sizeof(Cell))) {
    prefetch(pair.next[n] + at);
    prefetch_far(pair.values[n] + at);
  }
}

// Scores all queries in tiles of even size; the first one prefetches, if any does.
template <Store S, bool Fetch>
void score_queries(const KeyPair<typename Stored<S>::Type>& pair, const float* q, int count, int head_dim, float* out) {
  const int tiles = (count + kScoreQueries - 1) / kScoreQueries, size = (count + tiles - 1) / tiles;
  with_count<kScoreQueries>(size, [&](auto m) {
    score_tile<S, decltype(m)::value, Fetch>(pair, q, head_dim, out);
  });
  for (int first = size; first < count; first += size)
    with_count<kScoreQueries>(std::min(size, count - first), [&](auto m) {
      score_tile<S, decltype(m)::value, false>(pair, q + first * kQueryStride, head_dim, out + first * kSegment);
    });
}

template <Store S>
void widen_value(const typename Stored<S>::Type* v, int value_dim, float* to) {
  const int whole = value_dim / 16 * 16;
  widen<S>(v, whole, to);
  for (int d = whole; d < padded(value_dim); ++d) to[d] = d < value_dim ? Stored<S>::get(v[d]) : 0.0f;
}

// Converts the keys and values of a segment up to `hi` that are not converted yet. (Groups of 16 keys are converted whole;
// readers mask keys from `hi` on.)
template <Store S>
void keep_segment(const HeadCache& head, const Workspace& work, int segment, int hi) {
  const int head_dim = head.cache.head_dim, value_dim = head.cache.value_dim, number = segment / kSegment;
  const auto* keys = static_cast<const typename Stored<S>::Type*>(head.cache.keys);
  const auto* values = static_cast<const typename Stored<S>::Type*>(head.cache.values);
  int& there = work.kept->num_keys[number];
  for (int at = there / 16 * 16; at < hi - segment; at += 16)
    widen<S>(keys + head.group16(segment + at), 16 * head_dim, work.kept_keys + (segment + at) * head_dim);
  for (int at = there; at < hi - segment; ++at)
    widen_value<S>(values + head.value(segment + at), value_dim, work.kept_values + (segment + at) * padded(value_dim));
  there = std::max(there, hi - segment);
}

// Whether tiles of many queries also read keys and values as they are stored, rather than converted to floats first.
template <Store S>
constexpr bool reads_as_stored() { return S == Store::F32 || !kConvertsFirst; }

template <Store S>
void score_segment(const HeadCache& head, const Workspace& work, int count, int segment, int lo, int hi, bool is_kept) {
  const int head_dim = head.cache.head_dim;
  for (int at = lo / 32 * 32; at < hi; at += 32) {  // a segment is a multiple of 32, so pairs never cross its end
    const auto pair = key_pair<S>(head, at, lo, hi);
    float* out = work.scores + (at - segment);
    if (is_kept) {
      const float* first = work.kept_keys + at * head_dim;
      const float* second = work.kept_keys + std::min(at + 16, (hi - 1) / 16 * 16) * head_dim;
      score_queries<Store::F32, false>({{first, second}, {}, {}}, work.q, count, head_dim, out);
    } else if (reads_as_stored<S>() || count <= kScoreQueries) {
      score_queries<S, true>(pair, work.q, count, head_dim, out);
    } else if constexpr (!reads_as_stored<S>()) {
      float* wide[2] = {work.widened, work.widened + 16 * head_dim};
      for (int n = 0; n < 2; ++n) {
        fetch_next(pair, n, head_dim);
        widen<S>(pair.keys[n], 16 * head_dim, wide[n]);
      }
      score_queries<Store::F32, false>({{wide[0], wide[1]}, {}, {}}, work.q, count, head_dim, out);
    }
  }
}

// ── weights of one query in one segment, of which it sees keys [first, limit) ──

// Calls whole(at) for every group of 16 keys that is visible as a whole, part(at) for the one or two others.
template <class Whole, class Part>
inline void over_groups(int first, int limit, const Whole& whole, const Part& part) {
  int at = first / 16 * 16;
  if (at < first) part(at), at += 16;
  for (; at + 16 <= limit; at += 16) whole(at);
  if (at < limit) part(at);
}

inline constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// `slope`: of ALiBi, 0 without; a score grows by slope * (at - own), `own` being the query's own place.
inline float largest_score(float* scores, int first, int limit, float cap, float slope = 0.0f, int own = 0) {
  Floats largest = splat(kNever);
  const auto score = [&](int at) {
    Floats s = load(scores + at);
    if (slope != 0.0f) {
      s = fma(splat(slope), add(splat(static_cast<float>(at - own)), load(kLanes)), s);
      store(scores + at, s);
    }
    if (!(cap > 0.0f)) return s;
    const Floats capped = mul(splat(cap), tanh(mul(s, splat(1.0f / cap))));
    store(scores + at, capped);
    return capped;
  };
  over_groups(
      first, limit, [&](int at) { largest = max(largest, score(at)); },
      [&](int at) { largest = max(largest, keep_lanes(score(at), first - at, limit - at, splat(kNever))); });
  return max_lanes(largest);
}

// Turns the scores of the groups in [from, to) into weights, 0 for masked keys; returns their sum.
inline float weigh(float* scores, int from, int to, int first, int limit, float top) {
  Floats total = zeros();
  const auto weight = [&](int at) { return exp_within(max(sub(load(scores + at), splat(top)), splat(-87.0f))); };
  const auto take = [&](int at, Floats w) {
    store(scores + at, w);
    total = add(total, w);
  };
  for (int at = from; at < first / 16 * 16; at += 16) store(scores + at, zeros());
  over_groups(
      first, limit, [&](int at) { take(at, weight(at)); },
      [&](int at) { take(at, keep_lanes(weight(at), first - at, limit - at, zeros())); });
  for (int at = (limit + 15) / 16 * 16; at < to; at += 16) store(scores + at, zeros());
  return sum_lanes(total);
}

// The same for all queries of a tile. All maxima are computed first: a query's exponentials depend on its own maximum, but
// work on different queries overlaps.
inline void weigh_queries(const Workspace& work, const int* first, const int* limit, const float* slopes, int count,
                          int segment, int lo, int hi, float cap, Partial* fresh) {
  const auto seen_from = [&](int i) { return std::clamp(first[i], lo, hi) - segment; };
  const auto seen_to = [&](int i) { return std::max(std::min(limit[i], hi) - segment, seen_from(i)); };
  for (int i = 0; i < count; ++i)
    fresh[i].largest = largest_score(work.scores + i * kSegment, seen_from(i), seen_to(i), cap,
                                     slopes != nullptr ? slopes[i] : 0.0f, limit[i] - 1 - segment);
  const int from = lo / 16 * 16 - segment, to = hi - segment;
  for (int i = 0; i < count; ++i)
    fresh[i].total = weigh(work.scores + i * kSegment, from, to, seen_from(i), seen_to(i), fresh[i].largest);
}

// ── sums: M queries x N vectors of a head, keys [lo, hi) of the segment, added to what `out` holds if `onto` ──
template <Store S, int M, int N, class Row>
void value_tile(Row row, const float* weights, int lo, int hi, bool onto, float* out, size_t out_stride) {
  Floats acc[M][N];
  each_sum<M, N>([&](int m, int n) { acc[m][n] = onto ? load(out + m * out_stride + 16 * n) : zeros(); });
  for (int key = lo; key < hi;) {
    int run;
    const typename Stored<S>::Type* v = row(key, run);  // the values of `run` keys are consecutive from here
    for (const int end = std::min(hi, key + run); key < end; ++key, v += row.stride) {
      Floats part[N];
      for (int n = 0; n < N; ++n) part[n] = Stored<S>::load16(v + 16 * n);
      unroll<M>([&](auto query) {
        constexpr int m = decltype(query)::value;
        const Floats w = splat(weights[m * kSegment + key]);
        for (int n = 0; n < N; ++n) acc[m][n] = fma(w, part[n], acc[m][n]);
      });
    }
  }
  each_sum<M, N>([&](int m, int n) { store(out + m * out_stride + 16 * n, acc[m][n]); });
}

template <Store S>
struct PagedRows {  // value rows of a segment in the cache; keys are counted from the segment's start
  const HeadCache& head;
  int segment, column;
  size_t stride;
  const typename Stored<S>::Type* operator()(int key, int& run) const {
    const int position = segment + key;
    run = head.cache.block_size - position % head.cache.block_size;
    return static_cast<const typename Stored<S>::Type*>(head.cache.values) + head.value(position) + column;
  }
};
struct WidenedRows {  // converted rows from key `first` on
  const float* values;
  int first;
  size_t stride;
  const float* operator()(int key, int& run) const {
    run = kNearValues;
    return values + static_cast<size_t>(key - first) * stride;
  }
};

inline constexpr int kValueVectors = 4;

template <Store S, class MakeRows>
void sum_keys(MakeRows rows, const Workspace& work, int count, int wide, int lo, int hi, bool onto) {
  for (int column = 0; column < wide; column += 16 * kValueVectors)
    with_count<kValueVectors>(std::min(kValueVectors, (wide - column) / 16), [&](auto n) {
      for (int first = 0; first < count; first += kValueQueries)
        with_count<kValueQueries>(std::min(kValueQueries, count - first), [&](auto m) {
          value_tile<S, decltype(m)::value, decltype(n)::value>(rows(column), work.scores + first * kSegment, lo, hi,
                                                                onto, work.sums + first * wide + column, wide);
        });
    });
}

template <Store S>
void sum_values(const HeadCache& head, const Workspace& work, int count, int segment, int lo, int hi, bool is_kept) {
  const int value_dim = head.cache.value_dim, wide = padded(value_dim);
  if (value_dim == wide && !is_kept && (reads_as_stored<S>() || count <= kValueQueries)) {
    const auto rows = [&](int column) { return PagedRows<S>{head, segment, column, static_cast<size_t>(value_dim)}; };
    return sum_keys<S>(rows, work, count, wide, lo, hi, false);
  }
  const auto* values = static_cast<const typename Stored<S>::Type*>(head.cache.values);
  const int step = is_kept ? kNearValues : kWidened;
  for (int from = lo; from < hi; from += step) {
    const int to = std::min(hi, from + step);
    for (int key = from; key < to && !is_kept; ++key)
      widen_value<S>(values + head.value(segment + key), value_dim, work.widened + static_cast<size_t>(key - from) * wide);
    const float* widened = is_kept ? work.kept_values + static_cast<size_t>(segment + from) * wide : work.widened;
    const auto rows = [&](int column) { return WidenedRows{widened + column, from, static_cast<size_t>(wide)}; };
    sum_keys<Store::F32>(rows, work, count, wide, from, to, from > lo);
  }
}

// Merges two parts of one query's context, with factors for the present and for the new part.
inline void join_as(float* sums, Partial& partial, const float* other_sums, const Partial& other, float keep, float take,
                    int wide) {
  if (other.total == 0.0f) return;
  if (partial.total == 0.0f) {
    partial = other;
    std::copy_n(other_sums, wide, sums);
    return;
  }
  partial = {std::max(partial.largest, other.largest), partial.total * keep + other.total * take};
  for (int d = 0; d < wide; d += 16)
    store(sums + d, fma(load(sums + d), splat(keep), mul(load(other_sums + d), splat(take))));
}

// The same for `count` queries, at most 16, whose exponentials are computed together.
inline void join_some(float* sums, Partial* partial, const float* other_sums, const Partial* other, int count, int wide) {
  float keep[16] = {}, take[16] = {};
  for (int i = 0; i < count; ++i) {
    const float largest = std::max(partial[i].largest, other[i].largest);
    keep[i] = partial[i].largest - largest;
    take[i] = other[i].largest - largest;
  }
  store(keep, exp(load(keep)));
  store(take, exp(load(take)));
  for (int i = 0; i < count; ++i)
    join_as(sums + i * wide, partial[i], other_sums + i * wide, other[i], keep[i], take[i], wide);
}
inline void join(float* sums, Partial& partial, const float* other_sums, const Partial& other, int value_dim) {
  join_some(sums, &partial, other_sums, &other, 1, padded(value_dim));
}

inline void gather_queries(const Workspace& work, const float* const* q, int count, int head_dim, float scale) {
  for (int i = 0; i < count; ++i) {
    float* to = work.q + i * kQueryStride;
    for (int d = 0; d < head_dim; ++d) to[d] = q[i][d] * scale;
  }
}

template <Store S>
void attend_segment(const AttentionTask& task, const HeadCache& head, const Workspace& work, const int* first,
                    const int* limit, const float* slopes, int count, int segment, int lo, int hi, bool is_kept,
                    float* sums, Partial* partial) {
  if constexpr (S == Store::I8) {
    score_rounded(head, work, count, segment, lo, hi);
  } else {
    if (is_kept) keep_segment<S>(head, work, segment, hi);
    score_segment<S>(head, work, count, segment, lo, hi, is_kept);
  }
  Partial fresh[kQueryTile];
  weigh_queries(work, first, limit, slopes, count, segment, lo, hi, task.softcap, fresh);
  if constexpr (S == Store::I8) sum_rounded(head, work, count, segment, lo - segment, hi - segment);
  else sum_values<S>(head, work, count, segment, lo - segment, hi - segment, is_kept);
  const int wide = padded(head.cache.value_dim);
  for (int i = 0; i < count; i += 16)
    join_some(sums + i * wide, partial + i, work.sums + i * wide, fresh + i, std::min(16, count - i), wide);
}

inline void attend(const AttentionTask& task, int kv_head, const int32_t* table, const float* const* q,
                   const int* first, const int* limit, const float* slopes, int count, int from, int to,
                   uint64_t keys_id, float* sums, Partial* partial, uint8_t* scratch) {
  const int head_dim = task.cache.head_dim, wide = padded(task.cache.value_dim);
  const Workspace work(scratch, task.cache.widest());
  const HeadCache head{task.cache, table, kv_head};
  from = std::max(from, *std::min_element(first, first + count));
  to = std::min(to, *std::max_element(limit, limit + count));
  const bool is_rounded = task.cache.store == Store::I8;
  const bool is_kept = keys_id != 0 && !is_rounded && task.cache.store != Store::F32 && from == 0 &&
                       to <= kKeptSegments * kSegment && count > kScoreQueries;
  if (is_kept && work.kept->of != keys_id) *work.kept = {keys_id, {}};
  if (is_rounded) prefetch_rounded(head, from, to);
  if (is_rounded) round_queries(work, q, count, head_dim, task.scale);
  else gather_queries(work, q, count, head_dim, task.scale);
  for (int i = 0; i < count; ++i) partial[i] = {kNever, 0.0f};
  std::fill(sums, sums + static_cast<size_t>(count) * wide, 0.0f);
  for (int segment = from / kSegment * kSegment; segment < to; segment += kSegment) {
    if (is_rounded) prefetch_rounded(head, segment + kSegment, to);
    with_store(task.cache.store, [&](auto s) {
      attend_segment<decltype(s)::value>(task, head, work, first, limit, slopes, count, segment, std::max(from, segment),
                                         std::min(to, segment + kSegment), is_kept, sums, partial);
    });
  }
}

inline void finish(const float* sums, const Partial& partial, const float* sink, int value_dim, float* out) {
  float keep = 1.0f, total = partial.total;
  if (sink != nullptr) {
    const float largest = std::max(partial.largest, *sink);
    keep = exp_one(partial.largest - largest);
    total = partial.total * keep + exp_one(*sink - largest);
  }
  const float factor = keep / total;
  for (int d = 0; d < value_dim; ++d) out[d] = sums[d] * factor;
}

inline void write_kv(const PagedCache& cache, int64_t slot, int kv_head, const float* key, const float* value) {
  const int offset = static_cast<int>(slot % cache.block_size), head_dim = cache.head_dim, value_dim = cache.value_dim;
  const size_t block = static_cast<size_t>(slot / cache.block_size);
  const size_t first = static_cast<size_t>(kv_head) * cache.block_size;
  with_store(cache.store, [&](auto s) {
    using Cell = Stored<decltype(s)::value>;
    if constexpr (decltype(s)::value == Store::I8) {
      write_rounded(cache, slot, kv_head, key, value);
    } else {
      auto* k = static_cast<typename Cell::Type*>(cache.keys) + block * cache.key_stride +
                (first + static_cast<size_t>(offset / 16 * 16)) * head_dim;
      auto* v = static_cast<typename Cell::Type*>(cache.values) + block * cache.value_stride +
                (first + static_cast<size_t>(offset)) * value_dim;
      typename Cell::Type narrowed[kMaxHeadDim];
      narrow<decltype(s)::value>(key, head_dim, narrowed);
      narrow<decltype(s)::value>(value, value_dim, v);
      for (int d = 0; d < head_dim; ++d) k[16 * d + offset % 16] = narrowed[d];
    }
  });
}

inline size_t attention_scratch_bytes(int widest) { return Workspace::bytes(widest); }

}  // namespace tokenmill::TM_ISA
