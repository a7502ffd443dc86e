// Functions over several rows (see avx512.h), for instruction sets without a better way than one row after another. Included
// after the other functions.
#pragma once

namespace tokenmill::TM_ISA {

template <int N>
inline Floats largest_lanes(const Floats (&rows)[N]) {
  float lanes[16] = {};
  for (int i = 0; i < N; ++i) lanes[i] = max_lanes(rows[i]);
  return load(lanes);
}
struct Packed {
  Ints first, second;
};
inline Packed pack(Ints a, Ints b) { return {a, b}; }
inline void store_packed(int8_t* p, Packed a) {
  store_i8(p, a.first);
  store_i8(p + 16, a.second);
}
template <int N>
inline void sum_halves(const Packed (&rows)[N], Ints& first, Ints& second) {
  int32_t sums[2][16] = {};
  for (int i = 0; i < N; ++i) sum_small(rows[i].first, rows[i].second, sums[0][i], sums[1][i]);
  std::memcpy(&first, sums[0], sizeof first);
  std::memcpy(&second, sums[1], sizeof second);
}
template <int N, class Register>
inline void store_lanes(void* p, Register a) {
  std::memcpy(p, &a, 4 * N);
}

}  // namespace tokenmill::TM_ISA
