// The vector types of the kernels in plain C++, for any processor; compilers turn the fixed loops into the target's default
// vector instructions (SSE2, NEON). avx512.h documents the functions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../half.h"

namespace tokenmill::TM_ISA {

inline constexpr int kSmallRows = 2;
inline constexpr int kTileRows = 2;
inline constexpr int kScoreQueries = 2;  // queries of a score tile, times two groups of 16 keys
inline constexpr int kValueQueries = 2;  // queries of a value tile, times up to 64 numbers of a head
inline constexpr bool kConvertsFirst = true;  // two-byte keys and values, once for all tiles of queries

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};
struct Bytes {
  uint8_t v[64];
};

template <class Lane>
inline Floats each(Lane lane) {
  Floats out;
  for (int i = 0; i < 16; ++i) out.v[i] = lane(i);
  return out;
}
inline Floats load(const float* p) {
  Floats out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
inline void store(float* p, Floats a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats splat(float x) {
  return each([&](int) { return x; });
}
inline Floats zeros() { return splat(0.0f); }
inline Floats add(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats sub(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats mul(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats div(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats reciprocal(Floats x) { return div(splat(1.0f), x); }
// Two roundings: without a fused instruction a correctly rounded fma would be a slow library call.
inline Floats fma(Floats a, Floats b, Floats c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Floats max(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats min(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats abs(Floats a) {
  return each([&](int i) { return std::fabs(a.v[i]); });
}
inline Floats round_even(Floats a) {
  return each([&](int i) { return std::nearbyintf(a.v[i]); });
}
inline float sum_lanes(Floats a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
inline float max_lanes(Floats a) {
  float best = a.v[0];
  for (int i = 1; i < 16; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
inline uint32_t lanes_above(Floats a, Floats limit) {
  uint32_t lanes = 0;
  for (int i = 0; i < 16; ++i) lanes |= static_cast<uint32_t>(!(a.v[i] <= limit.v[i])) << i;
  return lanes;
}
inline Ints to_ints(Floats a) {
  Ints out;
  for (int i = 0; i < 16; ++i) out.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i]));
  return out;
}
inline Floats times_power_of_two(Floats x, Floats n) {
  return each([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
    float out;
    std::memcpy(&out, &bits, 4);
    return x.v[i] * out;
  });
}
inline Floats keep_lanes(Floats a, int from, int to, Floats otherwise) {
  return each([&](int i) { return i >= from && i < to ? a.v[i] : otherwise.v[i]; });
}

inline Floats load_half(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
inline void store_half(uint16_t* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
inline Floats load_bfloat(const uint16_t* p) {
  return each([&](int i) { return bfloat_to_float(p[i]); });
}
inline Floats load_e4m3(const uint8_t* p) {
  return each([&](int i) { return half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7)); });
}
inline Floats load_u8(const uint8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}
inline Floats load_i8(const uint8_t* p) {
  return each([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
inline void store_i8(int8_t* p, Ints a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

// NaNs become huge integers, whose sums wrap around as in vector registers.
inline int32_t wrapped(uint32_t x) { return static_cast<int32_t>(x); }
inline uint32_t bits_of(int32_t x) { return static_cast<uint32_t>(x); }

inline Ints splat_int(int32_t x) {
  Ints out;
  for (int i = 0; i < 16; ++i) out.v[i] = x;
  return out;
}
inline Ints shift_left(Ints a, int bits) {
  for (int i = 0; i < 16; ++i) a.v[i] = wrapped(bits_of(a.v[i]) << bits);
  return a;
}
inline Ints shift_right(Ints a, int bits) {
  for (int i = 0; i < 16; ++i) a.v[i] >>= bits;
  return a;
}
inline Ints add(Ints a, Ints b) {
  for (int i = 0; i < 16; ++i) a.v[i] = wrapped(bits_of(a.v[i]) + bits_of(b.v[i]));
  return a;
}
inline Ints sub(Ints a, Ints b) {
  for (int i = 0; i < 16; ++i) a.v[i] = wrapped(bits_of(a.v[i]) - bits_of(b.v[i]));
  return a;
}
inline int32_t sum_lanes(Ints a) {
  uint32_t total = 0;
  for (int i = 0; i < 16; ++i) total += bits_of(a.v[i]);
  return wrapped(total);
}
inline void sum_small(Ints a, Ints b, int32_t& sum_a, int32_t& sum_b) {
  sum_a = sum_lanes(a);
  sum_b = sum_lanes(b);
}
inline Floats ratio_or_zero(Floats a, Floats b) {
  return each([&](int i) { return b.v[i] > 0.0f ? a.v[i] / b.v[i] : 0.0f; });
}
inline Floats to_floats(Ints a) {
  return each([&](int i) { return static_cast<float>(a.v[i]); });
}

inline Bytes load_bytes(const uint8_t* p) {
  Bytes out;
  std::memcpy(out.v, p, 64);
  return out;
}
inline void store_bytes(uint8_t* p, Bytes a) { std::memcpy(p, a.v, 64); }
inline Bytes low_nibbles(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] &= 0x0F;
  return a;
}
// Looks up indices below 16 in a table of bytes.
inline Bytes look_up(Bytes a, const uint8_t* table) {
  for (int i = 0; i < 64; ++i) a.v[i] = table[a.v[i]];
  return a;
}
inline Bytes high_nibbles(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] >> 4);
  return a;
}
template <int Bit>
inline Bytes add_bits(Bytes a, const uint8_t* bits) {
  for (int i = 0; i < 64; ++i) a.v[i] |= static_cast<uint8_t>(((bits[i / 8] >> (i % 8)) & 1) * Bit);
  return a;
}
template <int Slot>
inline Bytes bit_pairs(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] = (a.v[i] >> (2 * Slot)) & 3;
  return a;
}
template <int Slot>
inline Bytes add_bit_pair(Bytes a, Bytes pairs) {
  for (int i = 0; i < 64; ++i) a.v[i] |= static_cast<uint8_t>(((pairs.v[i] >> (2 * Slot)) & 3) << 4);
  return a;
}

struct Inputs {
  int8_t v[4];
};
inline Inputs splat_inputs(const int8_t* p) {
  Inputs out;
  std::memcpy(out.v, p, 4);
  return out;
}
template <bool Wide>
inline Ints dot4(Ints sum, Bytes w, Inputs x) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 4; ++k) sum.v[i] += static_cast<int32_t>(w.v[4 * i + k]) * x.v[k];
  return sum;
}
inline Bytes load_bytes_here(const uint8_t* p) { return load_bytes(p); }
inline Inputs splat_inputs_here(const int8_t* p) { return splat_inputs(p); }
inline void prefetch_far(const void*) {}
inline void prefetch_to_write(const void*) {}
inline void prefetch(const void*) {}

}  // namespace tokenmill::TM_ISA

#include "row_by_row.h"
