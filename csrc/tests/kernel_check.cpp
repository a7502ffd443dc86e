// Compares the kernels of all instruction sets that this processor supports, without Python or a model:
//
//   kernel_check            products and attention on a grid of formats, shapes and rows; exit status 1 if two differ
//   kernel_check time [N]   also GFLOP/s of the best sets, measured alternately, with 1 and with N threads
//
// Sets with fused multiply-adds agree to the bit; the portable one rounds twice and agrees approximately.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gemm.h"
#include "packing.h"

using namespace tokenmill;

namespace {

struct Format {
  const char* name;
  int bytes;  // of a block as files have it
  std::vector<int> halves;  // where its float16 numbers are
  std::vector<int> floats = {};  // and its float32 ones
};
const Format kFormats[] = {
    {"Q8_0", 34, {0}},      {"Q4_0", 18, {0}},       {"Q5_0", 22, {0}},     {"Q4_1", 20, {0, 2}},
    {"Q5_1", 24, {0, 2}},   {"Q4_K", 144, {0, 2}},   {"Q5_K", 176, {0, 2}}, {"Q6_K", 210, {208}},
    {"IQ4_NL", 18, {0}},    {"IQ4_XS", 136, {0}},    {"Q2_K", 84, {80, 82}}, {"Q3_K", 110, {108}},
    {"G4:2", 24, {}, {0, 4}}, {"G8:4", 40, {}, {0, 4}}, {"NF4:2", 20, {}, {0}}, {"NV4", 22, {}, {0}},
};

using Floats = std::vector<float>;

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr float kOutlierThresholds[] = {kNever, 1.1f, 0.0f};  // inputs of 8 bits, of 8 or 16 block by block, of 16

std::mt19937 generator(1);
Floats random_floats(size_t count) {
  std::normal_distribution<float> draw;
  Floats out(count);
  for (float& x : out) x = draw(generator);
  return out;
}

// Random bytes are valid values of a format, except for halves and floats, which are set between 2^-9 and 2^-8.
Matrix random_matrix(const Format& format, int rows, int columns) {
  const Packing packing = packing_from_name(format.name);
  const size_t row_bytes = source_row_bytes(packing.kind, columns);
  std::vector<uint8_t> source(static_cast<size_t>(rows) * row_bytes);
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(generator());
  for (size_t block = 0; block < source.size(); block += static_cast<size_t>(format.bytes)) {
    for (const int at : format.halves) {
      const auto half = static_cast<uint16_t>(0x1800u + generator() % 0x400u);
      std::memcpy(source.data() + block + at, &half, 2);
    }
    for (const int at : format.floats) {
      const uint32_t whole = 0x3B000000u + generator() % 0x800000u;
      std::memcpy(source.data() + block + at, &whole, 4);
    }
  }
  return pack_matrix(packing, rows, columns, source.data(), row_bytes);
}

// ── products ──

struct Product {  // of one instruction set
  Product(const Kernels& of, int threads) : kernels(of), pool(threads), runner(pool, of) {}

  void take(const Floats& x, int rows, int columns, float outlier_threshold) {
    in.prepare(rows, columns, kernels, {true, false, outlier_threshold});
    for (int r = 0; r < rows; ++r) in.put_row(r, x.data() + static_cast<size_t>(r) * columns, kernels);
    for (int t = 0; in.marks_outliers() && t < in.quant().tiles(); ++t) in.mark_outliers(t, kernels);
  }
  void run(const Linear& w, Gemm::Mode mode, float* out) {
    const Gemm gemm{&w, nullptr, in.view(), mode, out, static_cast<size_t>(w.w.rows)};
    runner.run(&gemm, 1);
  }

  const Kernels& kernels;
  Pool pool;
  Runner runner;
  Activations in;
};

float distance(const Floats& found, const Floats& expected) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - expected[i]) * (found[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return static_cast<float>(std::sqrt(difference / size));
}

bool agree(const std::string& set, const Floats& found, const Floats& expected, const char* what) {
  const bool same = std::memcmp(found.data(), expected.data(), 4 * found.size()) == 0;
  const float far = distance(found, expected);
  if (same || (set == "portable" && far < 2e-6f)) return true;
  std::printf("DIFFERS: %s, %s: by %.3g\n", set.c_str(), what, static_cast<double>(far));
  return false;
}

bool check_products(const Format& format, int outputs, int columns) {
  const Linear w{random_matrix(format, outputs, columns), {}};
  const std::vector<std::string> sets = runnable_kernels();
  bool good = true;
  for (const int rows : {1, 8, 9, 15, 16, 17, 31, 33, 100, 400})
    for (const float outlier_threshold : kOutlierThresholds)
      for (const Gemm::Mode mode : {Gemm::Mode::Store, Gemm::Mode::Add}) {
        const Floats x = random_floats(static_cast<size_t>(rows) * columns);
        const Floats before = random_floats(static_cast<size_t>(rows) * outputs);
        Floats expected;
        for (const std::string& set : sets) {
          Floats out = before;
          Product product(*kernels_named(set), 2);
          product.take(x, rows, columns, outlier_threshold);
          product.run(w, mode, out.data());
          if (expected.empty()) expected = out;
          char what[100];
          std::snprintf(what, sizeof what, "%s %d x %d, %d rows, fine above %g", format.name, outputs, columns, rows,
                        static_cast<double>(outlier_threshold));
          good &= agree(set, out, expected, what);
        }
      }
  return good;
}

// ── attention over an int8 cache ──

Floats attend(const Kernels& kernels, int head_dim, int value_dim, int context, int count, uint32_t seed) {
  generator.seed(seed);
  constexpr int block_size = 16;
  const int blocks = context / block_size + 2;
  const size_t cells = static_cast<size_t>(blocks) * block_size;
  std::vector<uint8_t> keys(cells * head_dim), values(cells * value_dim);
  Floats key_scales(cells), value_scales(cells);
  AttentionTask task;
  task.cache = {keys.data(), values.data(), key_scales.data(), value_scales.data(), Store::I8, 1, head_dim, block_size,
                value_dim, size_t{block_size} * head_dim, size_t{block_size} * value_dim, block_size};
  task.heads = count;
  task.scale = 0.2f;
  std::vector<int32_t> table;
  for (int b = 0; b < blocks; ++b) table.push_back(blocks - 1 - b);
  const Floats q = random_floats(static_cast<size_t>(count) * head_dim);
  for (int t = 0; t < context; ++t) {
    const Floats k = random_floats(static_cast<size_t>(head_dim)), v = random_floats(static_cast<size_t>(value_dim));
    kernels.write_kv(task.cache, static_cast<int64_t>(table[t / block_size]) * block_size + t % block_size, 0, k.data(),
                     v.data());
  }
  std::vector<const float*> queries;
  std::vector<int> first, limit;
  for (int i = 0; i < count; ++i) {
    queries.push_back(q.data() + static_cast<size_t>(i) * head_dim);
    limit.push_back(context - i);
    first.push_back(std::max(0, i % 2 ? context - 40 : 0));
  }
  const int wide = (value_dim + 15) / 16 * 16;
  Floats sums(static_cast<size_t>(count) * wide), out(static_cast<size_t>(count) * value_dim);
  std::vector<Partial> partial(static_cast<size_t>(count));
  std::vector<uint8_t> scratch(kernels.attention_scratch_bytes(task.cache.widest()) + 64);
  auto* room = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
  kernels.attend(task, 0, table.data(), queries.data(), first.data(), limit.data(), nullptr, count, 0, context, 0, sums.data(),
                 partial.data(), room);
  for (int i = 0; i < count; ++i)
    kernels.finish(sums.data() + i * wide, partial[static_cast<size_t>(i)], nullptr, value_dim,
                   out.data() + i * value_dim);
  return out;
}

bool check_attention(int head_dim, int value_dim) {
  bool good = true;
  for (const int context : {41, 255, 300, 600})
    for (const int count : {1, 3, 8, 24}) {
      Floats expected;
      for (const std::string& set : runnable_kernels()) {
        const Floats out = attend(*kernels_named(set), head_dim, value_dim, context, count, 7);
        if (expected.empty()) expected = out;
        if (distance(out, expected) < 1e-5f) continue;
        std::printf("DIFFERS: %s, attention %d and %d, context %d, %d queries\n", set.c_str(), head_dim, value_dim, context,
                    count);
        good = false;
      }
    }
  return good;
}

// ── speed ──

double seconds_of(Product& product, const Linear& w, float* out) {
  const auto start = std::chrono::steady_clock::now();
  product.run(w, Gemm::Mode::Store, out);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void time_products(const Format& format, int outputs, int columns, int rows, int threads, float outlier_threshold) {
  const Linear w{random_matrix(format, outputs, columns), {}};
  const Floats x = random_floats(static_cast<size_t>(rows) * columns);
  Floats out(static_cast<size_t>(rows) * outputs);
  std::vector<std::string> sets = runnable_kernels();
  sets.resize(std::min<size_t>(sets.size(), 2));
  std::vector<std::vector<double>> seconds(sets.size());
  const double flops = 2.0 * rows * outputs * columns;
  for (int round = 0; round < 5; ++round)
    for (size_t s = 0; s < sets.size(); ++s) {
      Product product(*kernels_named(sets[s]), threads);
      product.take(x, rows, columns, outlier_threshold);
      for (int i = 0; i < 3; ++i) seconds[s].push_back(seconds_of(product, w, out.data()));
    }
  std::printf("%-5s %5d x %5d, %4d rows, fine above %g, %2d threads:", format.name, outputs, columns, rows,
              static_cast<double>(outlier_threshold), threads);
  for (size_t s = 0; s < sets.size(); ++s) {
    std::sort(seconds[s].begin(), seconds[s].end());
    std::printf("   %s %.0f (median %.0f)", sets[s].c_str(), flops / seconds[s][0] / 1e9,
                flops / seconds[s][seconds[s].size() / 2] / 1e9);
  }
  std::printf(" GFLOP/s\n");
  std::fflush(stdout);
}

void time_all(int threads) {
  for (const Format& format : kFormats) time_products(format, 2048, 2048, 512, 1, kNever);
  time_products(kFormats[3], 2048, 2048, 512, 1, 0.0f);
  for (const int rows : {16, 64}) time_products(kFormats[0], 8192, 2048, rows, 1, kNever);
  time_products(kFormats[0], 8192, 2048, 512, threads, kNever);
  time_products(kFormats[5], 8192, 2048, 512, threads, kNever);
}

}  // namespace

int main(int count, char** arguments) {
  std::printf("instruction sets:");
  for (const std::string& set : runnable_kernels()) std::printf(" %s", set.c_str());
  std::printf("\n");
  bool good = true;
  for (const Format& format : kFormats)
    for (const int outputs : {16, 40, 96})
      for (const int columns : {256, 1024}) good &= check_products(format, outputs, columns);
  for (const int head_dim : {8, 64, 80, 128, 256, 512}) good &= check_attention(head_dim, head_dim);
  for (const auto& [head_dim, value_dim] : {std::pair{192, 128}, {24, 40}, {32, 20}})
    good &= check_attention(head_dim, value_dim);
  std::printf("%s\n", good ? "all sets agree" : "sets differ");
  if (count > 1 && std::string(arguments[1]) == "time") time_all(count > 2 ? std::atoi(arguments[2]) : 1);
  return good ? 0 : 1;
}
