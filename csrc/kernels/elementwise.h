// What is done number by number: exponentials, norms, activations, rotation, and turning floats into int8 blocks.
#pragma once
#include <bit>
#include <cmath>

namespace tokenmill::TM_ISA {

// e^x within 2 units in the last place; exactly 1 at 0. Below -87 the result is e^-87, above 88 it is e^88.
inline Floats exp(Floats x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const Floats n = round_even(mul(x, splat(1.44269504088896341f)));
  Floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), splat(1.0f));
  return times_power_of_two(p, n);
}
inline float exp_one(float x) {
  float lanes[16];
  store(lanes, exp(splat(x)));
  return lanes[0];
}
inline Floats sigmoid(Floats x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(zeros(), x)))); }
inline Floats tanh(Floats x) { return sub(splat(1.0f), div(splat(2.0f), add(exp(add(x, x)), splat(1.0f)))); }

inline Floats activate(Floats x, Activation kind) {
  if (kind == Activation::Silu) return mul(x, sigmoid(x));
  if (kind == Activation::GeluTanh) {
    const Floats cube = mul(mul(x, x), x);
    const Floats inner = mul(splat(0.7978845608028654f), fma(splat(0.044715f), cube, x));
    return mul(x, sigmoid(add(inner, inner)));  // (1 + tanh u) / 2 = sigmoid(2 u)
  }
  float lanes[16];
  store(lanes, x);
  for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678118654752f));
  return load(lanes);
}
inline void gate(const float* g, const float* up, Activation kind, float* out) {
  for (int i = 0; i < kBlock; i += 16) store(out + i, mul(activate(load(g + i), kind), load(up + i)));
}

// Runs body(first lane, vector count of lanes) over `size` numbers; the tail goes through a padded buffer.
template <class Body>
inline void in_vectors(int size, const float* x, Body body) {
  int i = 0;
  for (; i + 16 <= size; i += 16) body(i, load(x + i), 16);
  if (i == size) return;
  float tail[16] = {};
  for (int k = i; k < size; ++k) tail[k - i] = x[k];
  body(i, load(tail), size - i);
}
inline void store_some(float* p, Floats a, int count) {
  if (count == 16) return store(p, a);
  float lanes[16];
  store(lanes, a);
  for (int k = 0; k < count; ++k) p[k] = lanes[k];
}

inline void rms_norm(const float* x, const float* weight, float eps, int size, float* out) {
  Floats squares = zeros();
  in_vectors(size, x, [&](int, Floats a, int) { squares = fma(a, a, squares); });
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps);
  int i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, mul(mul(load(x + i), splat(factor)), load(weight + i)));
  for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}
inline void add_into(float* x, const float* y, int size) {
  in_vectors(size, x, [&](int i, Floats a, int count) {
    float other[16] = {};
    if (count == 16) return store(x + i, add(a, load(y + i)));
    for (int k = 0; k < count; ++k) other[k] = y[i + k];
    store_some(x + i, add(a, load(other)), count);
  });
}
inline void softcap(float* x, float cap, int size) {
  in_vectors(size, x, [&](int i, Floats a, int count) {
    store_some(x + i, mul(splat(cap), tanh(mul(a, splat(1.0f / cap)))), count);
  });
}
// Few numbers are above the best so far: those are looked at one by one.
inline void take_best(const float* x, int size, int place, Best& best) {
  const auto look_at = [&](int i) {
    if (std::isnan(x[i])) best.has_nan = true;
    if (x[i] > best.value) best.value = x[i], best.place = place + i;
  };
  int i = 0;
  for (; i + 16 <= size; i += 16)
    for (uint32_t lanes = lanes_above(load(x + i), splat(best.value)); lanes != 0; lanes &= lanes - 1)
      look_at(i + std::countr_zero(lanes));
  for (; i < size; ++i) look_at(i);
}
inline void rotate(float* head, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// Whole numbers of 16 bits as 256 * high + low: the nearest multiple of 256, and what is left, -128 .. 127.
struct TwoBytes {
  Ints high, low;
};
inline TwoBytes two_bytes(Ints whole) {
  const Ints high = shift_right(add(whole, splat_int(128)), 8);
  return {high, sub(whole, shift_left(high, 8))};
}
inline void store_numbers(Ints a, Ints b, int8_t* to) {  // 32 whole numbers that fit in bytes
  store_i8(to, a);
  store_i8(to + 16, b);
}

// Row m of a record of `count` rows (see QuantRows), and what is left over of its numbers.
inline void quantise_into(const float* x, size_t fine_at, uint8_t* record, int count, int m) {
  const Floats a = load(x), b = load(x + 16);
  const float largest = max_lanes(max(abs(a), abs(b)));
  const float most = fine_at == 0 ? 127.0f : 127.0f * 256.0f;
  const Floats inverse = splat(largest > 0.0f ? most / largest : 0.0f);
  Ints whole_a = to_ints(mul(a, inverse)), whole_b = to_ints(mul(b, inverse));
  if (fine_at != 0) {
    const TwoBytes of_a = two_bytes(whole_a), of_b = two_bytes(whole_b);
    store_numbers(of_a.low, of_b.low, QuantRows::numbers(record + fine_at, count, m));
    whole_a = of_a.high;
    whole_b = of_b.high;
  }
  store_numbers(whole_a, whole_b, QuantRows::numbers(record, count, m));
  int32_t first, second;
  sum_small(whole_a, whole_b, first, second);
  QuantRows::put_sums(record, count, m, largest * (1.0f / 127.0f), first, second);
}
inline void quantise_block(const float* x, const QuantRows& to, int row, int block) {
  const int t = to.tile == kTileRows ? row / kTileRows : row / to.tile;  // the first is no real division
  quantise_into(x, to.fine_at, to.record(t, block), to.rows_in(t), row - t * to.tile);
}
inline void quantise_row(const float* x, int cols, const QuantRows& to, int row) {
  const int t = row / to.tile, count = to.rows_in(t);
  const size_t step = QuantRows::record_bytes(count);
  uint8_t* record = to.record(t, 0);
  for (int k = 0; k + kBlock <= cols; k += kBlock, record += step)
    quantise_into(x + k, to.fine_at, record, count, row - t * to.tile);
}

}  // namespace tokenmill::TM_ISA
