// From logits to a token where a row asks for nothing but temperature, top-k, top-p and min-p: what tokenmill/sampling
// does with tensors, to the same bit, without sorting the vocabulary. Between the two functions torch takes the softmax.
// All sums are of whole numbers (2^-50 of the whole), so no result depends on the order of adding.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace tokenmill::TM_ISA {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Calls body(place) for every number that reaches `least`, in order.
template <class Body>
inline void for_reaching(const float* x, int size, float least, Body body) {
  const Floats below = splat(std::nextafter(least, kNothing));
  int i = 0;
  for (; i + 16 <= size; i += 16)
    for (uint32_t lanes = lanes_above(load(x + i), below); lanes != 0; lanes &= lanes - 1)
      body(i + std::countr_zero(lanes));
  for (; i < size; ++i)
    if (x[i] >= least) body(i);
}

// The k-th largest of `size` numbers. Of k groups that hold the k highest maxima each has one number that reaches the
// lowest of these: so only numbers that do are looked at closely.
inline float kth_largest(const float* x, int size, int k) {
  const int step = 16 * std::clamp(size / (4 * k), 1, 64);  // a group is one lane of so many numbers
  std::vector<float> numbers;
  for (int i = 0; i + 16 <= size; i += step) {
    Floats highest = load(x + i);
    for (int j = i + 16; j + 16 <= std::min(size, i + step); j += 16) highest = max(highest, load(x + j));
    numbers.resize(numbers.size() + 16);
    store(numbers.data() + numbers.size() - 16, highest);
  }
  float least = kNothing;
  if (k <= static_cast<int>(numbers.size())) {
    std::nth_element(numbers.begin(), numbers.begin() + (k - 1), numbers.end(), std::greater<>());
    least = numbers[static_cast<size_t>(k - 1)];
  }
  numbers.clear();
  for_reaching(x, size, least, [&](int i) { numbers.push_back(x[i]); });
  if (static_cast<int>(numbers.size()) < k) return kNothing;
  std::nth_element(numbers.begin(), numbers.begin() + (k - 1), numbers.end(), std::greater<>());
  return numbers[static_cast<size_t>(k - 1)];
}

inline bool shape_row(const float* x, int size, float temperature, int64_t top_k, int padded, float* out) {
  Best best;
  take_best(x, size, 0, best);
  if (best.has_nan || !std::isfinite(best.value)) return false;
  if (temperature == 0.0f) std::copy_n(x, size, out);
  else
    for (int i = 0; i < size; ++i) out[i] = (x[i] - best.value) / temperature;
  std::fill(out + size, out + padded, kNothing);
  if (top_k > 0 && top_k < padded) {
    const float least = kth_largest(out, padded, static_cast<int>(top_k));
    for (int i = 0; i < padded; ++i) out[i] = out[i] < least ? kNothing : out[i];
  }
  return true;
}

inline constexpr float kWhole = 1125899906842624.0f;  // 2^50
inline int64_t mass_of(float probability) { return static_cast<int64_t>(probability * kWhole); }

// The mass of the last number kept when the largest are taken first until `needed` is reached, which all together do.
inline int64_t last_kept(std::vector<int64_t>& masses, int64_t needed) {
  auto first = masses.begin(), end = masses.end();
  while (true) {
    const int64_t pivot = first[(end - first) / 2];
    const auto equal = std::partition(first, end, [&](int64_t mass) { return mass > pivot; });
    const auto less = std::partition(equal, end, [&](int64_t mass) { return mass == pivot; });
    int64_t larger = 0;
    for (auto mass = first; mass != equal; ++mass) larger += *mass;
    if (larger >= needed) {
      end = equal;
      continue;
    }
    needed -= larger + pivot * (less - equal);
    if (needed <= 0) return pivot;
    first = less;
  }
}

struct Candidates {  // tokens whose mass reaches `least`, in order
  std::vector<int> tokens;
  std::vector<int64_t> masses;
  int64_t total = 0;

  void take(const float* probs, int size, int64_t least) {
    tokens.clear();
    masses.clear();
    total = 0;
    // float(least) may be rounded upwards; what comes along for that is sorted out by its mass.
    for_reaching(probs, size, static_cast<float>(least) / kWhole * 0.9999998f, [&](int i) {
      const int64_t mass = mass_of(probs[i]);
      if (mass < least) return;
      tokens.push_back(i);
      masses.push_back(mass);
      total += mass;
    });
  }
};

// The first of `count` masses with which their sum passes the target.
inline int pass(const int64_t* masses, int count, int64_t target) {
  int i = 0;
  for (; i + 1 < count && target >= masses[i]; ++i) target -= masses[i];
  return i;
}
inline int64_t target_of(double uniform, int64_t total) {
  return std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
}

struct RowMass {
  static constexpr int kGroup = 512;
  std::vector<int64_t> sums;  // of kGroup tokens each
  int64_t total = 0;
  float highest = 0.0f;

  RowMass(const float* probs, int size) {
    Floats most = zeros();
    for (int i = 0; i < size; i += kGroup) {
      const int count = std::min(size - i, kGroup);
      int64_t sum = 0;
      for (int j = 0; j < count; ++j) sum += mass_of(probs[i + j]);
      in_vectors(count, probs + i, [&](int, Floats some, int) { most = max(most, some); });
      sums.push_back(sum);
      total += sum;
    }
    highest = max_lanes(most);
  }
};

inline int draw_uncut(const float* probs, int size, const RowMass& mass, double uniform) {
  int64_t target = target_of(uniform, mass.total);
  const int group = pass(mass.sums.data(), static_cast<int>(mass.sums.size()), target);
  for (int g = 0; g < group; ++g) target -= mass.sums[static_cast<size_t>(g)];
  int i = group * RowMass::kGroup;
  for (; i + 1 < size && target >= mass_of(probs[i]); ++i) target -= mass_of(probs[i]);
  return i;
}

inline int draw_row(const float* probs, int size, double top_p, double min_p, double uniform) {
  const RowMass mass(probs, size);
  if (top_p >= 1.0 && min_p <= 0.0) return draw_uncut(probs, size, mass, uniform);
  const int64_t highest = mass_of(mass.highest);
  int64_t least = std::max<int64_t>(1, static_cast<int64_t>(min_p * static_cast<double>(highest)));
  Candidates found;
  if (top_p < 1.0) {
    const double share = std::ceil(top_p * static_cast<double>(mass.total));
    const int64_t needed = std::min(std::max<int64_t>(1, static_cast<int64_t>(share)), mass.total);
    int shift = 10;
    do {
      found.take(probs, size, std::max<int64_t>(1, highest >> shift));
      shift += 10;
    } while (found.total < needed);
    std::vector<int64_t> masses = found.masses;
    least = std::max(least, last_kept(masses, needed));
  } else {
    found.take(probs, size, least);
  }
  for (int64_t& kept : found.masses) {
    if (kept >= least) continue;
    found.total -= kept;
    kept = 0;
  }
  const int at = pass(found.masses.data(), static_cast<int>(found.masses.size()), target_of(uniform, found.total));
  return found.tokens[static_cast<size_t>(at)];
}

}  // namespace tokenmill::TM_ISA
