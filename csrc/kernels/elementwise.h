// Elementwise operations: exponentials, norms, activations, RoPE.
#pragma once
#include <bit>
#include <cmath>

namespace tokenmill::TM_ISA {

// e^x for x in [-87, 88] with an error of at most 2 ulp; exactly 1 at 0.
inline Floats exp_within(Floats x) {
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
// Below -87 the result is e^-87, above 88 it is e^88.
inline Floats exp(Floats x) { return exp_within(min(max(x, splat(-87.0f)), splat(88.0f))); }
inline float exp_one(float x) {
  float lanes[16];
  store(lanes, exp(splat(x)));
  return lanes[0];
}
inline Floats sigmoid(Floats x) { return reciprocal(add(splat(1.0f), exp(sub(zeros(), x)))); }
inline Floats tanh(Floats x) { return sub(splat(1.0f), div(splat(2.0f), add(exp(add(x, x)), splat(1.0f)))); }

inline Floats activate(Floats x, Activation kind) {
  if (kind == Activation::Silu) return mul(x, sigmoid(x));
  if (kind == Activation::Relu) return max(x, zeros());
  if (kind == Activation::Relu2) {
    const Floats positive = max(x, zeros());
    return mul(positive, positive);
  }
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
// The limit of silu(gate) and of up; 0: there is none.
inline float clamp_of(Activation kind) {
  switch (kind) {
    case Activation::ClampedSilu4: return 4.0f;
    case Activation::ClampedSilu5: return 5.0f;
    case Activation::ClampedSilu7: return 7.0f;
    case Activation::ClampedSilu16: return 16.0f;
    default: return 0.0f;
  }
}
inline Floats gated(Floats g, Floats up, Activation kind) {
  if (kind == Activation::SiluTo10) {
    const Floats limit = splat(10.0f);
    return mul(activate(min(g, limit), Activation::Silu), max(min(up, limit), splat(-10.0f)));
  }
  if (const float size = clamp_of(kind); size != 0.0f) {
    const Floats limit = splat(size);
    return mul(min(activate(g, Activation::Silu), limit), max(min(up, limit), sub(zeros(), limit)));
  }
  if (kind != Activation::SwigluOai) return mul(activate(g, kind), up);
  const Floats limit = splat(7.0f), low = min(g, limit), between = max(min(up, limit), splat(-7.0f));
  return mul(mul(low, sigmoid(mul(low, splat(1.702f)))), add(between, splat(1.0f)));
}
inline void gate(const float* g, const float* up, Activation kind, float* out) {
  for (int i = 0; i < kBlock; i += 16) store(out + i, gated(load(g + i), load(up + i), kind));
}

// Calls body(first lane, vector count of lanes) over `size` numbers; the tail is processed in a padded buffer.
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

inline void xielu(const float* x, const XieluCurve& curve, int size, float* out) {
  in_vectors(size, x, [&](int i, Floats a, int count) {
    const Floats above = max(a, zeros()), below = min(a, zeros());
    const Floats is_below = min(mul(below, splat(-1e38f)), splat(1.0f));
    const Floats grown = sub(sub(exp(min(a, splat(curve.eps))), splat(1.0f)), below);
    const Floats curved = mul(mul(splat(curve.negative), is_below), grown);
    store_some(out + i, add(fma(mul(splat(curve.positive), above), above, curved), mul(splat(curve.linear), a)), count);
  });
}

inline void rms_norm(const float* x, const float* weight, float eps, int size, float* out) {
  Floats squares = zeros();
  in_vectors(size, x, [&](int, Floats a, int) { squares = fma(a, a, squares); });
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps);
  int i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, mul(mul(load(x + i), splat(factor)), load(weight + i)));
  for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}
inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int size, float* out) {
  Floats sums = zeros();
  in_vectors(size, x, [&](int, Floats a, int) { sums = add(sums, a); });
  const float mean = sum_lanes(sums) / static_cast<float>(size);
  for (int i = 0; i < size; ++i) out[i] = x[i] - mean;
  rms_norm(out, weight, eps, size, out);
  for (int i = 0; bias != nullptr && i < size; ++i) out[i] += bias[i];
}
inline void scale(float* x, float factor, int size) {
  in_vectors(size, x, [&](int i, Floats a, int count) { store_some(x + i, mul(a, splat(factor)), count); });
}
inline void sigmoid_all(const float* x, int size, float* out) {
  in_vectors(size, x, [&](int i, Floats a, int count) { store_some(out + i, sigmoid(a), count); });
}
inline void silu_all(const float* x, int size, float* out) {
  in_vectors(size, x, [&](int i, Floats a, int count) { store_some(out + i, activate(a, Activation::Silu), count); });
}
inline void add_into(float* x, const float* y, int size) {
  in_vectors(size, x, [&](int i, Floats a, int count) {
    float other[16] = {};
    if (count == 16) return store(x + i, add(a, load(y + i)));
    for (int k = 0; k < count; ++k) other[k] = y[i + k];
    store_some(x + i, add(a, load(other)), count);
  });
}
inline void multiply(const float* x, const float* y, int size, float* out) {
  int i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, mul(load(x + i), load(y + i)));
  for (; i < size; ++i) out[i] = x[i] * y[i];
}
// Taps are added in order, the oldest token's first, in any step: equal inputs give equal sums.
inline void short_conv(const float* const* taps, const float* weight, const float* bias, const float* gate, int kernel,
                       int size, float* out) {
  int i = 0;
  for (; i + 16 <= size; i += 16) {
    Floats sum = bias != nullptr ? load(bias + i) : zeros();
    for (int k = 0; k < kernel; ++k)
      if (taps[k] != nullptr) sum = fma(load(weight + static_cast<size_t>(k) * size + i), load(taps[k] + i), sum);
    store(out + i, mul(load(gate + i), sum));
  }
  for (; i < size; ++i) {
    float sum = bias != nullptr ? bias[i] : 0.0f;
    for (int k = 0; k < kernel; ++k)
      if (taps[k] != nullptr) sum += weight[static_cast<size_t>(k) * size + i] * taps[k][i];
    out[i] = gate[i] * sum;
  }
}
inline void softcap(float* x, float cap, int size) {
  in_vectors(size, x, [&](int i, Floats a, int count) {
    store_some(x + i, mul(splat(cap), tanh(mul(a, splat(1.0f / cap)))), count);
  });
}
// Few numbers exceed the best so far: only those are compared one by one.
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
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const Floats a = load(head + i), b = load(head + i + half), c = load(cos + i), s = load(sin + i);
    store(head + i, sub(mul(a, c), mul(b, s)));
    store(head + i + half, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace tokenmill::TM_ISA
