// The vector types of the kernels for AVX2 with FMA and F16C (and AVX-VNNI if enabled by compiler flags): each is a pair of
// 256-bit registers. avx512.h documents the functions.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tokenmill::TM_ISA {

inline constexpr int kSmallRows = 4;
inline constexpr int kTileRows = 2;
inline constexpr int kScoreQueries = 3;  // queries of a score tile, times two groups of 16 keys
inline constexpr int kValueQueries = 2;  // queries of a value tile, times up to 64 numbers of a head
inline constexpr bool kConvertsFirst = true;  // two-byte keys and values, once for all tiles of queries

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats reciprocal(Floats x) { return div(splat(1.0f), x); }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Floats round_even(Floats x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline float sum_lanes(Floats x) {
  const __m256 both = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float max_lanes(Floats x) {
  const __m256 both = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline uint32_t lanes_above(Floats x, Floats limit) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLE_UQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLE_UQ));
  return static_cast<uint32_t>(low | high << 8);
}
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline Floats times_power_of_two(Floats x, Floats n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.a), bias), 23);
  const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.b), bias), 23);
  return {_mm256_mul_ps(x.a, _mm256_castsi256_ps(a)), _mm256_mul_ps(x.b, _mm256_castsi256_ps(b))};
}
inline Floats keep_lanes(Floats x, int from, int to, Floats otherwise) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto half = [&](__m256 value, __m256 other, int first) {
    const __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from - first), index),
                                               _mm256_cmpgt_epi32(_mm256_set1_epi32(to - first), index));
    return _mm256_blendv_ps(other, value, _mm256_castsi256_ps(inside));
  };
  return {half(x.a, otherwise.a, 0), half(x.b, otherwise.b, 8)};
}

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Floats load_half(const uint16_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
inline void store_half(uint16_t* p, Floats x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, mode));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, mode));
}
inline Floats load_bfloat(const uint16_t* p) {
  const auto widen = [](__m128i raw) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  };
  return {widen(load128(p)), widen(load128(p + 8))};
}
inline Floats load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
  const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline Floats load_u8(const uint8_t* p) {
  const __m128i raw = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8)))};
}
inline Floats load_i8(const uint8_t* p) {
  const __m128i raw = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8)))};
}
inline void store_i8(int8_t* p, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints shift_left(Ints x, int bits) { return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)}; }
inline Ints shift_right(Ints x, int bits) { return {_mm256_srai_epi32(x.a, bits), _mm256_srai_epi32(x.b, bits)}; }
inline Ints add(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints sub(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline int32_t sum_lanes(Ints x) {
  const __m256i both = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
}
inline void sum_small(Ints a, Ints b, int32_t& sum_a, int32_t& sum_b) {
  sum_a = sum_lanes(a);
  sum_b = sum_lanes(b);
}
inline Floats ratio_or_zero(Floats x, Floats y) {
  const auto ratio = [](__m256 p, __m256 q) {
    return _mm256_and_ps(_mm256_div_ps(p, q), _mm256_cmp_ps(q, _mm256_setzero_ps(), _CMP_GT_OQ));
  };
  return {ratio(x.a, y.a), ratio(x.b, y.b)};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

inline Bytes load_bytes(const uint8_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_bytes(uint8_t* p, Bytes x) {
  auto* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
inline Bytes low_nibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(0x0F);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes high_nibbles(Bytes x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
// Looks up indices below 16 in a table of bytes.
inline Bytes look_up(Bytes x, const uint8_t* table) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(both, x.a), _mm256_shuffle_epi8(both, x.b)};
}
template <int Bit>
inline Bytes add_bits(Bytes x, const uint8_t* bits) {
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                          3, 3, 3, 3, 3, 3);
  const __m256i each = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  const auto half = [&](__m256i value, const uint8_t* word_at) {
    int32_t word;
    std::memcpy(&word, word_at, 4);
    const __m256i byte = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), each);
    const __m256i set = _mm256_cmpeq_epi8(byte, each);
    return _mm256_or_si256(value, _mm256_and_si256(set, _mm256_set1_epi8(Bit)));
  };
  return {half(x.a, bits), half(x.b, bits + 4)};
}
template <int Slot>
inline Bytes bit_pairs(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(3);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 2 * Slot), mask),
          _mm256_and_si256(_mm256_srli_epi16(x.b, 2 * Slot), mask)};
}
template <int Slot>
inline Bytes add_bit_pair(Bytes x, Bytes pairs) {
  const auto half = [](__m256i value, __m256i pair) {
    __m256i moved = pair;
    if constexpr (Slot == 0) moved = _mm256_slli_epi16(pair, 4);
    if constexpr (Slot == 1) moved = _mm256_slli_epi16(pair, 2);
    if constexpr (Slot == 3) moved = _mm256_srli_epi16(pair, 2);
    return _mm256_or_si256(value, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
  };
  return {half(x.a, pairs.a), half(x.b, pairs.b)};
}

struct Inputs {
  __m256i v;
};
inline Inputs splat_inputs(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return {_mm256_set1_epi32(word)};
}
template <bool Wide>
inline __m256i dot4_half(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (!Wide) return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones));
  // All 8 bits would overflow the int16 pairs: the low seven and the top one are multiplied separately.
  const __m256i low = _mm256_and_si256(w, _mm256_set1_epi8(0x7F));
  const __m256i top = _mm256_andnot_si256(_mm256_set1_epi8(0x7F), w);
  const __m256i low_sum = _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones);
  const __m256i top_sum = _mm256_madd_epi16(_mm256_maddubs_epi16(top, x), ones);
  return _mm256_add_epi32(sum, _mm256_add_epi32(low_sum, top_sum));
#endif
}
template <bool Wide>
inline Ints dot4(Ints sum, Bytes w, Inputs x) {
  return {dot4_half<Wide>(sum.a, w.a, x.v), dot4_half<Wide>(sum.b, w.b, x.v)};
}
inline Bytes load_bytes_here(const uint8_t* p) { return load_bytes(p); }
inline Inputs splat_inputs_here(const int8_t* p) { return splat_inputs(p); }
// In assembly, because a compiler considers a function that only prefetches to be empty.
inline void prefetch_far(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }
inline void prefetch_to_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p))); }
inline void prefetch(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }

}  // namespace tokenmill::TM_ISA

#include "row_by_row.h"
