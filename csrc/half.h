// Scalar conversions between float32 and the two 16-bit formats, round to nearest even.
#pragma once
#include <cstdint>
#include <cstring>

namespace tokenmill {

inline float bits_to_float(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline uint32_t float_to_bits(float x) {
  uint32_t out;
  std::memcpy(&out, &x, 4);
  return out;
}

inline float bfloat_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }
inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // keep NaN a NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7FFFu;
  if (rest >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | ((rest & 0x3FFu) << 13));
  if (rest >= 0x400u) return bits_to_float(sign | ((rest << 13) + 0x38000000u));
  const float tiny = static_cast<float>(rest) * 5.9604644775390625e-8f;  // subnormal: rest * 2^-24
  return bits_to_float(sign | float_to_bits(tiny));
}
inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds past the largest half
  if (rest < 0x38800000u) {                                               // subnormal: let the adder round at 2^-24
    const float shifted = bits_to_float(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = rest + 0xFFFu + ((rest >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace tokenmill
