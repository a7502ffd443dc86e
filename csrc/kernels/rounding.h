// Quantisation of activations to int8 blocks (QuantRows). A few rows are quantised together, so that the values per row
// (largest magnitude, scale, sums) fill the lanes of a register and are adjacent in the record.
#pragma once
#include <cmath>
#include <numeric>

namespace tokenmill::TM_ISA {

// Splits 16-bit integers into 256 * high + low: the nearest multiple of 256, and the rest, -128 .. 127.
struct TwoBytes {
  Ints high, low;
};
inline TwoBytes two_bytes(Ints whole) {
  const Ints high = shift_right(add(whole, splat_int(128)), 8);
  return {high, sub(whole, shift_left(high, 8))};
}
inline void store_numbers(Ints a, Ints b, int8_t* to) {  // 32 integers that fit in bytes
  store_packed(to, pack(a, b));
}

inline constexpr int kRoundedRows = kSmallRows;  // most rows that are quantised together

// Stores all fields of R rows from row m on except q, given the sums of q's halves; lanes are rows. (See
// QuantRows::put_sums.)
template <int R>
inline void put_sums(uint8_t* record, int count, int m, Floats scale, Ints first, Ints second) {
  const auto field = [&](int number) { return record + 4 * static_cast<size_t>(number * count + m); };
  const Ints total = add(first, second), none = splat_int(0);
  store_lanes<R>(field(0), scale);
  store_lanes<R>(field(1), mul(scale, to_floats(total)));
  store_lanes<R>(field(2), sub(none, shift_left(total, 7)));
  store_lanes<R>(field(3), sub(none, shift_left(total, 3)));
  store_lanes<R>(field(4), sub(none, shift_left(first, 5)));
  store_lanes<R>(field(5), sub(none, shift_left(second, 5)));
}

// Quantises R rows of 32 numbers, `stride` apart, to rows from m on of a record of `count` rows; `Fine`: also stores the
// remainders in the record `remainder_at` bytes later.
template <int R, bool Fine>
inline void round_rows(const float* x, size_t stride, size_t remainder_at, uint8_t* record, int count, int m) {
  Floats sizes[R];
  for (int r = 0; r < R; ++r) sizes[r] = max(abs(load(x + r * stride)), abs(load(x + r * stride + 16)));
  const Floats largest = largest_lanes<R>(sizes);
  alignas(64) float inverse[16];
  store(inverse, ratio_or_zero(splat(Fine ? 127.0f * 256.0f : 127.0f), largest));
  Packed numbers[R];
  unroll<R>([&](auto step) {
    constexpr int r = decltype(step)::value;
    const Floats factor = splat(inverse[r]);
    Ints a = to_ints(mul(load(x + r * stride), factor)), b = to_ints(mul(load(x + r * stride + 16), factor));
    if constexpr (Fine) {
      const TwoBytes of_a = two_bytes(a), of_b = two_bytes(b);
      store_numbers(of_a.low, of_b.low, QuantRows::numbers(record + remainder_at, count, m + r));
      a = of_a.high;
      b = of_b.high;
    }
    numbers[r] = pack(a, b);
    store_packed(QuantRows::numbers(record, count, m + r), numbers[r]);
  });
  Ints first, second;
  sum_halves<R>(numbers, first, second);
  put_sums<R>(record, count, m, mul(largest, splat(1.0f / 127.0f)), first, second);
}

// Calls body(R, Fine) with compile-time constants.
template <class Body>
inline void with_rows(int rows, bool is_fine, Body body) {
  with_count<kRoundedRows>(rows, [&](auto count) {
    if (is_fine) body(count, std::true_type{});
    else body(count, std::false_type{});
  });
}

// Quantises `rows` rows of `blocks` blocks, `stride` apart, to rows from `row` and blocks from `block` of `to`.
inline void quantise(const float* x, size_t stride, int rows, int blocks, const QuantRows& to, int row, int block) {
  for (int done = 0; done < rows;) {
    const int t = (row + done) / to.tile, m = row + done - t * to.tile, count = to.rows_in(t);
    const int together = std::min({kRoundedRows, rows - done, count - m});
    const float* from = x + done * stride;
    uint8_t* record = to.record(t, block);
    with_rows(together, to.remainder_at != 0, [&](auto r, auto fine) {
      for (int b = 0; b < blocks; ++b)
        round_rows<decltype(r)::value, decltype(fine)::value>(
            from + b * kBlock, stride, to.remainder_at, record + b * QuantRows::record_bytes(count), count, m);
    });
    done += together;
  }
}

// Quantises act(gate) * up of `rows` rows x 32 columns as one block of rows [row, row + rows); `row` begins a tile. The
// records are far apart and no longer in a near cache: each is prefetched while the previous one is filled.
inline void gate_rows(const float* gates, const float* ups, int rows, Activation kind, const QuantRows& to, int row,
                      int block) {
  alignas(64) float gated[kRoundedRows * kBlock];
  for (int done = 0; done < rows;) {
    const int t = (row + done) / to.tile, m = row + done - t * to.tile, count = to.rows_in(t);
    const int together = std::min({kRoundedRows, rows - done, count - m});
    uint8_t* record = to.record(t, block);
    const uint8_t* next = record + static_cast<size_t>(to.blocks) * QuantRows::record_bytes(count) + 64 * m;
    const bool is_last = done + together == rows;
    for (int r = 0; r < together; ++r) {
      if (!is_last) prefetch_to_write(next + 64 * r);
      if (!is_last && to.remainder_at != 0) prefetch_to_write(next + to.remainder_at + 64 * r);
      gate(gates + (done + r) * kBlock, ups + (done + r) * kBlock, kind, gated + r * kBlock);
    }
    with_rows(together, to.remainder_at != 0, [&](auto r, auto fine) {
      round_rows<decltype(r)::value, decltype(fine)::value>(gated, kBlock, to.remainder_at, record, count, m);
    });
    done += together;
  }
}

// Fills in the sums and scales of a block's remainder record.
inline void complete_second(uint8_t* record, size_t remainder_at, int count, const float* limit) {
  const auto* scale = reinterpret_cast<const float*>(record);
  uint8_t* fine = record + remainder_at;
  for (int m = 0; m < count; ++m) {
    const int8_t* numbers = QuantRows::numbers(fine, count, m);
    const int32_t first = std::accumulate(numbers, numbers + kBlock / 2, 0);
    const int32_t second = std::accumulate(numbers + kBlock / 2, numbers + kBlock, 0);
    QuantRows::put_sums(fine, count, m, scale[m] > limit[m] ? scale[m] * (1.0f / 256.0f) : 0.0f, first, second);
  }
}

// Lists the blocks of tile t in which a row's scale exceeds `outlier_threshold` times that row's quadratic mean over all
// blocks, and completes their remainder records: rows that don't need it get a scale of 0. Lanes are rows.
inline void mark_outliers(const QuantRows& rows, int t, float outlier_threshold) {
  const int count = rows.rows_in(t);
  const size_t step = QuantRows::record_bytes(count);
  uint8_t* const first_record = rows.record(t, 0);
  const auto scales_of = [&](int b) {  // lanes beyond the rows are undefined
    return keep_lanes(load(reinterpret_cast<const float*>(first_record + b * step)), 0, count, zeros());
  };
  Floats squares = zeros();
  for (int b = 0; b < rows.blocks; ++b) squares = add(squares, mul(scales_of(b), scales_of(b)));
  alignas(64) float limit[16];
  store(limit, squares);
  for (float& of_row : limit) of_row = outlier_threshold * std::sqrt(of_row / static_cast<float>(rows.blocks));
  uint16_t* list = rows.list(t);
  uint16_t listed = 0;
  for (int b = 0; b < rows.blocks; ++b) {
    if (lanes_above(scales_of(b), load(limit)) == 0) continue;
    list[++listed] = static_cast<uint16_t>(b);
    complete_second(first_record + b * step, rows.remainder_at, count, limit);
  }
  list[0] = listed;
}

}  // namespace tokenmill::TM_ISA
