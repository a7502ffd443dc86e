// Latent attention over the paged cache: one entry per token for all heads, whose first `rank` values are also the value.
//
//   scores [queries][256] = q . entry          weights = e^(score - largest)        sums [queries][rank] = weights . entry
//
// Segments of 256 entries begin at absolute positions and are merged in order, as in attention.h. The product of a query and
// an entry has a fixed order of summation, so a query's result depends on its own context only.
#pragma once

namespace tokenmill::TM_ISA {

inline constexpr int kEntryTile = 4;  // queries multiplied by an entry while it is in registers

// Loads 16 values of an entry from `at` on; zeros beyond its end.
template <Store S>
inline Floats entry_part(const typename Stored<S>::Type* entry, int at, int width) {
  if (at + 16 <= width) return Stored<S>::load16(entry + at);
  float tail[16] = {};
  for (int d = at; d < width; ++d) tail[d - at] = Stored<S>::get(entry[d]);
  return load(tail);
}

template <Store S>
struct PagedEntries {
  const EntryCache& cache;
  const int32_t* table;
  const int32_t* chosen;  // positions of the selected entries, ascending; null: all

  const typename Stored<S>::Type* operator()(int number) const {
    const int position = chosen == nullptr ? number : chosen[number];
    const size_t block = static_cast<size_t>(table[position / cache.block_size]);
    const size_t slot = block * cache.block_size + position % cache.block_size;
    return static_cast<const typename Stored<S>::Type*>(cache.entries) + slot * cache.width;
  }
};

// Computes the scores of M queries, [M][padded width], for the entries [lo, hi).
template <Store S, int M>
inline void score_entries(const PagedEntries<S>& entries, const float* q, int lo, int hi, float scale, float* scores) {
  const int width = entries.cache.width, wide = padded(width);
  for (int key = lo; key < hi; ++key) {
    const auto* entry = entries(key);
    Floats sums[M];
    for (int m = 0; m < M; ++m) sums[m] = zeros();
    for (int d = 0; d < wide; d += 16) {
      const Floats part = entry_part<S>(entry, d, width);
      for (int m = 0; m < M; ++m) sums[m] = fma(load(q + m * wide + d), part, sums[m]);
    }
    for (int m = 0; m < M; ++m) scores[m * kSegment + key - lo] = sum_lanes(sums[m]) * scale;
  }
}

// Adds the first `rank` values of the entries [lo, hi), weighted, for M queries: [M][padded rank].
template <Store S, int M>
inline void mix_entries(const PagedEntries<S>& entries, const float* weights, int lo, int hi, float* sums) {
  constexpr int kVectors = 4;
  const int width = entries.cache.width, wide = padded(entries.cache.rank);
  for (int first = 0; first < wide; first += 16 * kVectors) {
    const int count = std::min(kVectors, (wide - first) / 16);
    Floats acc[M][kVectors];
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < kVectors; ++n) acc[m][n] = zeros();
    for (int key = lo; key < hi; ++key) {
      const auto* entry = entries(key);
      for (int n = 0; n < count; ++n) {
        const Floats part = entry_part<S>(entry, first + 16 * n, width);
        for (int m = 0; m < M; ++m) acc[m][n] = fma(splat(weights[m * kSegment + key - lo]), part, acc[m][n]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < count; ++n) store(sums + m * wide + first + 16 * n, acc[m][n]);
  }
}

// Attends with M queries of one token to `limit` entries.
template <Store S, int M>
inline void attend_entry_tile(const PagedEntries<S>& entries, const float* q, int limit, float scale, float* sums,
                              Partial* partial, float* scratch) {
  const int wide = padded(entries.cache.rank);
  float* scores = scratch;
  float* fresh_sums = scratch + M * kSegment;
  for (int m = 0; m < M; ++m) partial[m] = {kNever, 0.0f};
  for (int lo = 0; lo < limit; lo += kSegment) {
    const int hi = std::min(lo + kSegment, limit), count = hi - lo;
    Partial fresh[M];
    score_entries<S, M>(entries, q, lo, hi, scale, scores);
    for (int m = 0; m < M; ++m) {
      float* own = scores + m * kSegment;
      std::fill(own + count, own + padded(count), kNever);
      fresh[m].largest = largest_score(own, 0, count, 0.0f);
      fresh[m].total = weigh(own, 0, padded(count), 0, count, fresh[m].largest);
    }
    mix_entries<S, M>(entries, scores, lo, hi, fresh_sums);
    for (int m = 0; m < M; ++m) join(sums + m * wide, partial[m], fresh_sums + m * wide, fresh[m], entries.cache.rank);
  }
}

inline size_t entry_scratch_floats(int rank) {
  return static_cast<size_t>(kEntryTile) * (kSegment + static_cast<size_t>(padded(rank)));
}

inline void attend_entries(const EntryCache& cache, const int32_t* table, const int32_t* chosen, const float* q, int count,
                           int limit, float scale, float* sums, Partial* partial, float* scratch) {
  const int wide = padded(cache.width), wide_sums = padded(cache.rank);
  with_store(cache.store, [&](auto s) {
    constexpr Store S = decltype(s)::value;
    if constexpr (S != Store::I8) {
      const PagedEntries<S> entries{cache, table, chosen};
      int i = 0;
      for (; i + kEntryTile <= count; i += kEntryTile)
        attend_entry_tile<S, kEntryTile>(entries, q + i * wide, limit, scale, sums + i * wide_sums, partial + i, scratch);
      for (; i < count; ++i)
        attend_entry_tile<S, 1>(entries, q + i * wide, limit, scale, sums + i * wide_sums, partial + i, scratch);
    }
  });
}

// ── an indexer's scores of entries ──

inline constexpr size_t kIndexScratchFloats = (kEntryTile + 1) * kSegment;

// totals [256] += weights[m] * max(0, q_m . entry) of M heads, for the entries [lo, hi)
template <Store S, int M>
inline void add_index_heads(const PagedEntries<S>& entries, const float* q, const float* weights, int lo, int hi,
                            float* totals, float* scores) {
  score_entries<S, M>(entries, q, lo, hi, 1.0f, scores);
  for (int m = 0; m < M; ++m) {
    float* own = scores + m * kSegment;
    std::fill(own + hi - lo, own + padded(hi - lo), 0.0f);
    for (int i = 0; i < hi - lo; i += 16)
      store(totals + i, fma(splat(weights[m]), max(load(own + i), zeros()), load(totals + i)));
  }
}

inline void index_scores(const EntryCache& cache, const int32_t* table, const float* q, const float* weights, int heads,
                         int from, int to, float* out, float* scratch) {
  const int wide = padded(cache.width);
  float *totals = scratch, *scores = scratch + kSegment;
  with_store(cache.store, [&](auto s) {
    constexpr Store S = decltype(s)::value;
    if constexpr (S != Store::I8) {
      const PagedEntries<S> entries{cache, table, nullptr};
      for (int lo = from; lo < to; lo += kSegment) {
        const int hi = std::min(lo + kSegment, to);
        std::fill(totals, totals + kSegment, 0.0f);
        int h = 0;
        for (; h + kEntryTile <= heads; h += kEntryTile)
          add_index_heads<S, kEntryTile>(entries, q + h * wide, weights + h, lo, hi, totals, scores);
        for (; h < heads; ++h) add_index_heads<S, 1>(entries, q + h * wide, weights + h, lo, hi, totals, scores);
        std::copy_n(totals, hi - lo, out + lo - from);
      }
    }
  });
}

// ── compressed entries ──

// Loads 16 values from `at` on; zeros beyond the end.
inline Floats part_of(const float* x, int at, int size) {
  if (at + 16 <= size) return load(x + at);
  float tail[16] = {};
  for (int d = at; d < size; ++d) tail[d - at] = x[d];
  return load(tail);
}

inline void mix_by_gates(const float* const* values, const float* const* gates, const float* const* biases, int count,
                         int size, float* out) {
  for (int i = 0; i < size; i += 16) {
    const auto gate = [&](int k) { return add(part_of(gates[k], i, size), part_of(biases[k], i, size)); };
    Floats largest = gate(0), total = zeros(), sum = zeros();
    for (int k = 1; k < count; ++k) largest = max(largest, gate(k));
    for (int k = 0; k < count; ++k) {
      const Floats weight = exp(sub(gate(k), largest));
      total = add(total, weight);
      sum = fma(weight, part_of(values[k], i, size), sum);
    }
    store_some(out + i, div(sum, total), std::min(16, size - i));
  }
}

inline void write_entry(const EntryCache& cache, int64_t slot, const float* values) {
  with_store(cache.store, [&](auto s) {
    constexpr Store S = decltype(s)::value;
    if constexpr (S != Store::I8)
      narrow<S>(values, cache.width, static_cast<typename Stored<S>::Type*>(cache.entries) + static_cast<size_t>(slot) * cache.width);
  });
}

}  // namespace tokenmill::TM_ISA
