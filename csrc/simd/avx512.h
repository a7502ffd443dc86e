// The vector types and functions that the kernels use, for AVX-512 with VNNI: 16 floats, 16 int32, 64 bytes per register.
// The other files of this folder define the same names for other instruction sets; the kernels use only these names.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tokenmill::TM_ISA {

inline constexpr int kSmallRows = 8;  // most activation rows a one-panel tile holds in registers
inline constexpr int kTileRows = 6;   // rows of the two-panel tile: 12 int and 12 float accumulators, 8 left over
inline constexpr int kScoreQueries = 8;  // queries of a score tile, times two groups of 16 keys
inline constexpr int kValueQueries = 6;  // queries of a value tile, times up to 64 numbers of a head
// Whether attention converts two-byte keys and values to floats once for all tiles of queries, before their products. With
// 16 numbers in a register, converting them in every tile is cheaper than storing and reading them (docs/experiments).
inline constexpr bool kConvertsFirst = false;

struct Floats {  // 16 float32
  __m512 v;
};
struct Ints {  // 16 int32
  __m512i v;
};
struct Bytes {  // 64 bytes: 16 outputs x 4 consecutive inputs
  __m512i v;
};

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// 1 / a, correctly rounded, for a in [1, 2^126]: verified for every such number. A division would take 16 cycles.
inline Floats reciprocal(Floats a) {
  const __m512 one = _mm512_set1_ps(1.0f), near = _mm512_rcp14_ps(a.v);
  const __m512 nearer = _mm512_fmadd_ps(near, _mm512_fnmadd_ps(a.v, near, one), near);
  // The last bit matters only if the result is between two numbers, and then the upper one is nearer.
  const __m512 factor = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(nearer), _mm512_set1_epi32(1)));
  return {_mm512_fmadd_ps(factor, _mm512_fnmadd_ps(a.v, nearer, one), nearer)};
}
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats round_even(Floats a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline float sum_lanes(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline float max_lanes(Floats a) { return _mm512_reduce_max_ps(a.v); }
// lane i is the largest of rows[i], for up to 8 of them
template <int N>
inline Floats largest_lanes(const Floats (&rows)[N]) {
  const auto row = [&](int i) { return rows[i < N ? i : N - 1].v; };
  const auto of_two = [&](int i) {
    return _mm512_max_ps(_mm512_unpacklo_ps(row(i), row(i + 1)), _mm512_unpackhi_ps(row(i), row(i + 1)));
  };
  const auto of_four = [&](int i) {
    const __m512d a = _mm512_castps_pd(of_two(i)), b = _mm512_castps_pd(of_two(i + 2));
    return _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const __m512 low = of_four(0), high = N > 4 ? of_four(4) : low;
  __m512 all = _mm512_max_ps(_mm512_shuffle_f32x4(low, high, 0x44), _mm512_shuffle_f32x4(low, high, 0xEE));
  all = _mm512_max_ps(all, _mm512_shuffle_f32x4(all, all, 0xB1));
  return {_mm512_shuffle_f32x4(all, all, 0x08)};
}
// a / b where b is above 0, otherwise 0
inline Floats ratio_or_zero(Floats a, Floats b) {
  return {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(b.v, _mm512_setzero_ps(), _CMP_GT_OQ), a.v, b.v)};
}
// a bit for each lane that is above the limit or NaN
inline uint32_t lanes_above(Floats a, Floats limit) { return _mm512_cmp_ps_mask(a.v, limit.v, _CMP_NLE_UQ); }
inline Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
// a * 2^n for integers n in [-126, 127], if the result is a normal number
inline Floats times_power_of_two(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// keeps lanes [from, to), the others become `otherwise`
inline Floats keep_lanes(Floats a, int from, int to, Floats otherwise) {
  const uint32_t below_to = to >= 16 ? 0xFFFFu : to <= 0 ? 0u : (1u << to) - 1u;
  const uint32_t below_from = from >= 16 ? 0xFFFFu : from <= 0 ? 0u : (1u << from) - 1u;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below_to & ~below_from), otherwise.v, a.v)};
}

inline Floats load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(uint16_t* p, Floats a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, mode));
}
inline Floats load_bfloat(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
// e4m3 times 2^-8: its bits are those of a half of that value
inline Floats load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBF80))))};
}
inline Floats load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats load_i8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store_i8(int8_t* p, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
// the first N lanes
template <int N>
inline void store_lanes(void* p, Floats a) { _mm512_mask_storeu_ps(p, (1u << N) - 1u, a.v); }
template <int N>
inline void store_lanes(void* p, Ints a) { _mm512_mask_storeu_epi32(p, (1u << N) - 1u, a.v); }

inline Ints splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints shift_left(Ints a, int bits) { return {_mm512_slli_epi32(a.v, bits)}; }
inline Ints shift_right(Ints a, int bits) { return {_mm512_srai_epi32(a.v, bits)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }

// 32 integers that fit in a byte
struct Packed {
  __m256i v;
};
inline Packed pack(Ints a, Ints b) {
  const __m256i bytes = _mm512_cvtsepi16_epi8(_mm512_packs_epi32(a.v, b.v));
  return {_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7))};
}
inline void store_packed(int8_t* p, Packed a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
// lane i: the sum of the first, or second, 16 numbers of rows[i], for up to 8 of them
template <int N>
inline void sum_halves(const Packed (&rows)[N], Ints& first, Ints& second) {
  const auto fours = [&](int i) {
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), rows[i < N ? i : N - 1].v);
  };
  const auto of_four = [&](int i) {
    const __m256i a = _mm256_hadd_epi32(fours(i), fours(i + 1)), b = _mm256_hadd_epi32(fours(i + 2), fours(i + 3));
    return _mm256_hadd_epi32(a, b);
  };
  const __m256i low = of_four(0), high = N > 4 ? of_four(4) : low;
  first = {_mm512_zextsi256_si512(_mm256_permute2x128_si256(low, high, 0x20))};
  second = {_mm512_zextsi256_si512(_mm256_permute2x128_si256(low, high, 0x31))};
}
// lane sums of two registers whose numbers fit in a byte
inline void sum_small(Ints a, Ints b, int32_t& sum_a, int32_t& sum_b) {
  const __m128i ones = _mm_set1_epi8(1), zero = _mm_setzero_si128();
  const __m128i fours_a = _mm_dpbusd_epi32(zero, ones, _mm512_cvtepi32_epi8(a.v));
  const __m128i fours_b = _mm_dpbusd_epi32(zero, ones, _mm512_cvtepi32_epi8(b.v));
  const __m128i pairs = _mm_hadd_epi32(fours_a, fours_b);
  const __m128i both = _mm_hadd_epi32(pairs, pairs);
  sum_a = _mm_cvtsi128_si32(both);
  sum_b = _mm_extract_epi32(both, 1);
}
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(0x0F))}; }
inline Bytes high_nibbles(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0F))};
}
// Looks up indices below 16 in a table of bytes.
inline Bytes look_up(Bytes a, const uint8_t* table) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), a.v)};
}
// adds `Bit` to the bytes whose bit is set in the 64-bit word at `bits`
template <int Bit>
inline Bytes add_bits(Bytes a, const uint8_t* bits) {
  uint64_t word;
  std::memcpy(&word, bits, 8);
  return {_mm512_mask_add_epi8(a.v, static_cast<__mmask64>(word), a.v, _mm512_set1_epi8(Bit))};
}
// the two bits at 2 * Slot of every byte
template <int Slot>
inline Bytes bit_pairs(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 2 * Slot), _mm512_set1_epi8(3))};
}
// adds 16 * (the two bits at 2 * Slot of every byte of `pairs`)
template <int Slot>
inline Bytes add_bit_pair(Bytes a, Bytes pairs) {
  __m512i moved;
  if constexpr (Slot == 0) moved = _mm512_slli_epi16(pairs.v, 4);
  if constexpr (Slot == 1) moved = _mm512_slli_epi16(pairs.v, 2);
  if constexpr (Slot == 2) moved = pairs.v;
  if constexpr (Slot == 3) moved = _mm512_srli_epi16(pairs.v, 2);
  return {_mm512_ternarylogic_epi32(a.v, moved, _mm512_set1_epi8(0x30), 0xF8)};  // a | (moved & 0x30)
}

// Four input bytes repeated for all 16 outputs.
struct Inputs {
  __m512i v;
};
inline Inputs splat_inputs(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
// sum[o] += w[o][0..3] . x[0..3], exact; `Wide`: weights may use all 8 bits
template <bool Wide>
inline Ints dot4(Ints sum, Bytes w, Inputs x) {
  return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)};
}
// Loads that the compiler does not move.
inline Bytes load_bytes_here(const uint8_t* p) {
  Bytes out;
  asm volatile("vmovdqu64 %1, %0" : "=v"(out.v) : "m"(*reinterpret_cast<const __m512i_u*>(p)));
  return out;
}
inline Inputs splat_inputs_here(const int8_t* p) {
  Inputs out;
  asm volatile("vpbroadcastd %1, %0" : "=v"(out.v) : "m"(*reinterpret_cast<const int32_t*>(p)));
  return out;
}
// In assembly, because a compiler considers a function that only prefetches to be empty.
inline void prefetch_far(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }
inline void prefetch_to_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p))); }
inline void prefetch(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }

}  // namespace tokenmill::TM_ISA
