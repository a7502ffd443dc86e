// Samples a token for rows that use only temperature, top-k, top-p and min-p. The result has the same bits as that of
// tokenmill/sampling, without sorting the vocabulary and, with top-k, without storing its probabilities. All sums are
// integer sums, so results depend neither on their order nor on negligible tokens that were skipped.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace tokenmill::TM_ISA {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Calls body(index) for every number that is at least `least`, in order.
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

// The k-th largest of `size` numbers. The numbers are divided into groups; each of the k groups with the highest maxima has a
// number that reaches the lowest of these maxima, so only numbers that reach it are candidates.
inline float kth_largest(const float* x, int size, int k, std::vector<float>& numbers) {
  const int step = 16 * std::clamp(size / (4 * k), 1, 64);  // a group is one lane of this many numbers
  numbers.clear();
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

// Divides logits by the temperature. Rounding may make different logits equal, but never changes their order.
struct Scale {
  float highest, temperature;  // temperature 0: logits are not scaled
  float operator()(float x) const { return temperature == 0.0f ? x : (x - highest) / temperature; }
};

inline void scale_all(const float* x, int size, const Scale& scale, std::vector<float>& out) {
  out.resize(static_cast<size_t>(size));
  if (scale.temperature == 0.0f) std::copy_n(x, size, out.data());
  else
    for (int i = 0; i < size; ++i) out[static_cast<size_t>(i)] = (x[i] - scale.highest) / scale.temperature;
}

// Finds the logits that reach the k-th largest after scaling, and their tokens; returns false if all do.
inline bool scale_highest(const float* x, int size, int64_t k, const Scale& scale, DrawRoom& room) {
  if (k <= 0 || k >= size) return false;
  const float kth = kth_largest(x, size, static_cast<int>(k), room.logits);
  if (kth == kNothing) return false;
  const float least = scale(kth), nearly = kth - 1e-6f * (scale.highest - kth);  // rounding errors are 1e-7 each
  room.logits.clear();
  room.tokens.clear();
  for_reaching(x, size, nearly, [&](int i) {
    const float scaled = scale(x[i]);
    if (scaled < least) return;
    room.logits.push_back(scaled);
    room.tokens.push_back(i);
  });
  return true;
}

// Softmax in place of numbers whose largest is `highest`. Probabilities below e^-40 of the largest become 0.
inline void softmax(float* x, int size, float highest) {
  const Floats least = splat(-40.0f), nothing = exp(least);
  in_vectors(size, x, [&](int i, Floats some, int count) {
    store_some(x + i, sub(exp(max(sub(some, splat(highest)), least)), nothing), count);
  });
  int64_t sum = 0;  // in units of 2^-40
  for (int i = 0; i < size; ++i) sum += static_cast<int64_t>(x[i] * 1099511627776.0f);
  const float total = static_cast<float>(static_cast<double>(sum) / 1099511627776.0);
  for (int i = 0; i < size; ++i) x[i] /= total;
}

inline void softmax_row(const float* x, int size, float* out) {
  Best best;
  take_best(x, size, 0, best);
  const bool is_sound = !best.has_nan && std::isfinite(best.value);
  for (int i = 0; i < size; ++i) out[i] = is_sound ? x[i] : 0.0f;
  if (is_sound) softmax(out, size, best.value);
}

// Probabilities in fixed point, in units of 2^-50: their sums are exact in any order (`sampling/fixed_point.py`).
inline constexpr float kWhole = 1125899906842624.0f;  // 2^50
inline int64_t to_fixed(float probability) { return static_cast<int64_t>(probability * kWhole); }

// The last number kept if the largest are taken first until their sum reaches `needed`, which is at most the total.
inline int64_t last_kept(std::vector<int64_t>& fixed_probs, int64_t needed) {
  auto first = fixed_probs.begin(), end = fixed_probs.end();
  while (true) {
    const int64_t pivot = first[(end - first) / 2];
    const auto equal = std::partition(first, end, [&](int64_t prob) { return prob > pivot; });
    const auto less = std::partition(equal, end, [&](int64_t prob) { return prob == pivot; });
    int64_t larger = 0;
    for (auto prob = first; prob != equal; ++prob) larger += *prob;
    if (larger >= needed) {
      end = equal;
      continue;
    }
    needed -= larger + pivot * (less - equal);
    if (needed <= 0) return pivot;
    first = less;
  }
}

struct Candidates {  // tokens whose probability reaches `least`, in order
  std::vector<int> tokens;
  std::vector<int64_t> fixed_probs;
  int64_t total = 0;

  void take(const float* probs, int size, int64_t least) {
    tokens.clear();
    fixed_probs.clear();
    total = 0;
    // float(least) may be rounded up, so the limit is lowered; the exact comparison is made in fixed point.
    for_reaching(probs, size, static_cast<float>(least) / kWhole * 0.9999998f, [&](int i) {
      const int64_t prob = to_fixed(probs[i]);
      if (prob < least) return;
      tokens.push_back(i);
      fixed_probs.push_back(prob);
      total += prob;
    });
  }
};

// The index of the first of `count` fixed-point probabilities at which their cumulative sum exceeds the target.
inline int pass(const int64_t* fixed_probs, int count, int64_t target) {
  int i = 0;
  for (; i + 1 < count && target >= fixed_probs[i]; ++i) target -= fixed_probs[i];
  return i;
}
inline int64_t target_of(double uniform, int64_t total) {
  return std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
}

struct RowProbs {
  static constexpr int kGroup = 512;
  std::vector<int64_t> sums;  // sums over kGroup tokens each
  int64_t total = 0;
  float highest = 0.0f;

  RowProbs(const float* probs, int size) {
    Floats most = zeros();
    for (int i = 0; i < size; i += kGroup) {
      const int count = std::min(size - i, kGroup);
      int64_t sum = 0;
      for (int j = 0; j < count; ++j) sum += to_fixed(probs[i + j]);
      in_vectors(count, probs + i, [&](int, Floats some, int) { most = max(most, some); });
      sums.push_back(sum);
      total += sum;
    }
    highest = max_lanes(most);
  }
};

inline int draw_uncut(const float* probs, int size, const RowProbs& row, double uniform) {
  int64_t target = target_of(uniform, row.total);
  const int group = pass(row.sums.data(), static_cast<int>(row.sums.size()), target);
  for (int g = 0; g < group; ++g) target -= row.sums[static_cast<size_t>(g)];
  int i = group * RowProbs::kGroup;
  for (; i + 1 < size && target >= to_fixed(probs[i]); ++i) target -= to_fixed(probs[i]);
  return i;
}

inline int draw_row(const float* probs, int size, double top_p, double min_p, double uniform) {
  const RowProbs row(probs, size);
  if (top_p >= 1.0 && min_p <= 0.0) return draw_uncut(probs, size, row, uniform);
  const int64_t highest = to_fixed(row.highest);
  int64_t least = std::max<int64_t>(1, static_cast<int64_t>(min_p * static_cast<double>(highest)));
  Candidates found;
  if (top_p < 1.0) {
    const double share = std::ceil(top_p * static_cast<double>(row.total));
    const int64_t needed = std::min(std::max<int64_t>(1, static_cast<int64_t>(share)), row.total);
    int shift = 10;
    do {
      found.take(probs, size, std::max<int64_t>(1, highest >> shift));
      shift += 10;
    } while (found.total < needed);
    std::vector<int64_t> fixed_probs = found.fixed_probs;
    least = std::max(least, last_kept(fixed_probs, needed));
  } else {
    found.take(probs, size, least);
  }
  for (int64_t& kept : found.fixed_probs) {
    if (kept >= least) continue;
    found.total -= kept;
    kept = 0;
  }
  const int count = static_cast<int>(found.fixed_probs.size());
  const int at = pass(found.fixed_probs.data(), count, target_of(uniform, found.total));
  return found.tokens[static_cast<size_t>(at)];
}

inline int draw_token(const float* x, int size, const DrawParams& parameters, DrawRoom& room) {
  Best best;
  take_best(x, size, 0, best);
  if (best.has_nan || !std::isfinite(best.value)) return -1;
  if (parameters.is_greedy) return best.place;
  const Scale scale{best.value, parameters.temperature};
  const bool is_part = scale_highest(x, size, parameters.top_k, scale, room);
  if (!is_part) scale_all(x, size, scale, room.logits);
  float* probs = room.logits.data();
  const int count = static_cast<int>(room.logits.size());
  softmax(probs, count, scale(best.value));
  const int at = draw_row(probs, count, parameters.top_p, parameters.min_p, parameters.uniform);
  return is_part ? room.tokens[static_cast<size_t>(at)] : at;
}

}  // namespace tokenmill::TM_ISA
