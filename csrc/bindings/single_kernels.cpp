// Single kernels, for tests and benchmarks.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include "bindings/arrays.h"

namespace tokenmill {
namespace {

class Bench {  // a matrix product with its own pool, without a model around it
 public:
  Bench(int threads, const std::string& isa, float outlier_threshold)
      : kernels_(kernels_or_best(isa)), pool_(threads), runner_(pool_, kernels_),
        outlier_threshold_(outlier_threshold) {}

  void linear(const Matrix& w, const std::optional<FloatVector>& bias, Array<const float, 2> x, Array<float, 2> out) {
    if (x.shape(1) != static_cast<size_t>(w.cols) || out.shape(0) != x.shape(0) ||
        out.shape(1) != static_cast<size_t>(w.rows))
      throw std::invalid_argument("x must be [rows, cols of the matrix] and out [rows, rows of the matrix]");
    const Linear weight = linear_of(w, bias);
    nb::gil_scoped_release free;
    take(w, x.data(), static_cast<int>(x.shape(0)));
    const Gemm gemm{&weight, nullptr, in_.view(), Gemm::Mode::Store, out.data(), static_cast<size_t>(w.rows)};
    runner_.run(&gemm, 1);
  }

  uint64_t rescues() const { return pool_.rescues(); }

  // Seconds of each of `repeats` products, cycling through copies of one matrix so that weights come from cold memory.
  std::vector<double> time_linear(const std::vector<const Matrix*>& ws, int rows, int repeats) {
    const auto is_other = [&](const Matrix* w) {
      return w->kind != ws[0]->kind || w->rows != ws[0]->rows || w->cols != ws[0]->cols;
    };
    if (ws.empty() || rows < 1 || std::any_of(ws.begin(), ws.end(), is_other))
      throw std::invalid_argument("products are timed with matrices of one shape, and at least one row");
    nb::gil_scoped_release free;
    std::vector<float> x(static_cast<size_t>(rows) * ws[0]->cols, 0.5f), out(static_cast<size_t>(rows) * ws[0]->rows);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 2654435761u >> 16) % 2001) / 1000.0f - 1.0f;
    take(*ws[0], x.data(), rows);
    std::vector<Linear> weights;
    for (const Matrix* w : ws) weights.push_back({*w, {}});
    std::vector<double> seconds;
    for (int i = 0; i < repeats; ++i) {
      const Gemm gemm{&weights[static_cast<size_t>(i) % weights.size()], nullptr, in_.view(), Gemm::Mode::Store,
                      out.data(), static_cast<size_t>(ws[0]->rows)};
      const auto start = std::chrono::steady_clock::now();
      runner_.run(&gemm, 1);
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }

  // Seconds to read `bytes` of memory with all threads, `repeats` times.
  std::vector<double> time_read(size_t bytes, int repeats) {
    nb::gil_scoped_release free;
    const std::shared_ptr<uint8_t[]> memory = allocate_pages(bytes);
    const auto* words = reinterpret_cast<const uint64_t*>(memory.get());
    std::vector<double> seconds;
    const size_t step = 1 << 14;  // words of a piece
    std::atomic<uint64_t> sink{0};
    for (int i = 0; i < repeats; ++i) {
      const auto start = std::chrono::steady_clock::now();
      pool_.run(static_cast<int>(bytes / 8 / step), [&](int piece, int) {
        const uint64_t* p = words + static_cast<size_t>(piece) * step;
        uint64_t sums[8] = {};
        for (size_t k = 0; k < step; k += 8) {
          __builtin_prefetch(p + k + 256);
          for (size_t lane = 0; lane < 8; ++lane) sums[lane] += p[k + lane];
        }
        sink.fetch_add(sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7]);
      });
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }

 private:
  void take(const Matrix& w, const float* x, int rows) {
    if (w.is_ordered) throw std::invalid_argument("only a decoder multiplies by matrices with reordered columns");
    in_.prepare(rows, w.cols, kernels_, {is_quantised(w.kind), !is_quantised(w.kind), outlier_threshold_});
    pool_.run(rows, [&](int r, int) { in_.put_row(r, x + static_cast<size_t>(r) * w.cols, kernels_); });
    if (in_.marks_outliers()) pool_.run(in_.quant().tiles(), [&](int t, int) { in_.mark_outliers(t, kernels_); });
  }

  const Kernels& kernels_;
  Pool pool_;
  Runner runner_;
  float outlier_threshold_;
  Activations in_;
};

}  // namespace

void bind_single_kernels(nb::module_& m) {
  nb::class_<Bench>(m, "Bench")
      .def(nb::init<int, const std::string&, float>(), "threads"_a, "isa"_a = "", "outlier_threshold"_a = kNever)
      .def("linear", &Bench::linear, "matrix"_a, "bias"_a.none(), "x"_a, "out"_a.noconvert())
      .def("time_linear", &Bench::time_linear, "matrices"_a, "rows"_a, "repeats"_a)
      .def("time_read", &Bench::time_read, "num_bytes"_a, "repeats"_a)
      .def_prop_ro("rescues", &Bench::rescues);
}

}  // namespace tokenmill
