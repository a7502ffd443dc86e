// Matrix products of a step, cut into pieces for the pool. A piece is some pairs of panels (32 outputs) times a block of
// rows. The epilogue (store, add to the residual, gate and quantise for the next product, argmax) runs on each row's 32
// results while they are in the L1 cache.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "pool.h"

namespace tokenmill {

// A matrix, of which this rank may have some rows only: with tensor parallelism `w` and `bias` have rows
// [first, first + w.rows), and rank r has rows [borders[r], borders[r + 1]).
struct Linear {
  Matrix w;
  std::vector<float> bias;  // empty: none
  int site = -1;  // its number among the matrices that adapters may change; -1: they can't
  std::vector<int> borders = {};  // empty: the matrix is not cut
  int first = 0;

  bool is_cut() const { return !borders.empty(); }
  // Whether it reads quantised inputs in blocks of columns; matrices with reordered columns reorder their inputs first.
  bool reads_blocks() const { return is_quantised(w.kind) && !w.is_ordered; }
  int rows() const { return borders.empty() ? w.rows : borders.back(); }  // over all ranks
};

// An adapter's low-rank update of one matrix, see adapters.h.
struct LowRank {
  Linear a;
  Matrix b;
  std::vector<float> gain;  // empty: not DoRA
};

// The adapter updates of a product's rows.
struct AdaptedRows {
  std::vector<const LowRank*> parts;  // [rows], null: no adapter
  std::vector<size_t> at;             // [rows]: offset of the row's product with `a`
  const float* shrunk = nullptr;
};

// out [rows of b] += b shrunk
inline void add_low_rank(const LowRank& part, const float* shrunk, const Kernels& kernels, int panel, int panels, float* out) {
  Rows in{shrunk, static_cast<size_t>(part.b.cols), {}};
  in.quant.rows = 1;
  kernels.linear(part.b, in, {panel, panels, 0, 1, -1}, {out, 0, true}, nullptr);
}
void add_low_rank(const LowRank& part, const float* shrunk, const Kernels& kernels, float* out);

// The form in which activations are kept. Quantised blocks have 8 bits, or 16 if their largest magnitude exceeds
// `outlier_threshold` times the row's quadratic mean of all blocks' largest: infinity means 8 bits everywhere, 0 means 16.
struct Form {
  bool quantised, plain;
  float outlier_threshold;
};

// Activations in memory that is reused from step to step.
class Activations {
 public:
  // Allocates `rows` rows of `cols` values, in tiles (see QuantRows).
  void prepare(int rows, int cols, const Kernels& kernels, const Form& form);
  Rows view() const;
  float* row(int r) { return values_.data() + static_cast<size_t>(r) * cols_; }
  const QuantRows& quant() const { return quant_; }
  bool is_quantised() const { return form_.quantised; }
  bool is_plain() const { return form_.plain; }
  const Form& form() const { return form_; }
  bool marks_outliers() const { return form_.quantised && quant_.remainder_at != 0; }
  int cols() const { return cols_; }
  void quantise_rows(int r, int rows, const float* values, const Kernels& kernels) {
    kernels.quantise(values, static_cast<size_t>(cols_), rows, quant_.blocks, quant_, r, 0);
  }
  void put_row(int r, const float* values, const Kernels& kernels);  // stores a row in all forms
  // Lists the blocks with 16 bits of tile t; called once all its rows are quantised.
  void mark_outliers(int t, const Kernels& kernels) { kernels.mark_outliers(quant_, t, form_.outlier_threshold); }

 private:
  int cols_ = 0;
  Form form_{};
  PageVector<float> values_;
  PageVector<uint8_t> records_;
  std::vector<uint16_t> lists_;
  QuantRows quant_;
};

struct Gemm {
  enum class Mode : uint8_t { Store, Add, Gate, Best };
  const Linear* w = nullptr;
  const Linear* up = nullptr;  // Gate: w is the gate
  Rows in;
  Mode mode = Mode::Store;
  float* out = nullptr;  // Store, Add: [rows][out_stride]
  size_t out_stride = 0;
  Activation activation = Activation::Silu;
  Activations* gated = nullptr;  // Gate: receives act(gate) * up, at the columns of w's rows; unquantised if w is cut
  Best* best = nullptr;  // Best: [threads][rows], the argmax over each thread's outputs
  float softcap = 0.0f;  // Best: soft cap of the logits; 0: none
  float scale = 1.0f;  // Best: factor of the logits, before the soft cap
  std::optional<Rows> up_in = {};  // Gate: the input of `up`, if it differs from the gate's
  const int32_t* slots = nullptr;  // [rows] adapter slots; null: those of the step's rows
  const AdaptedRows *adapted = nullptr, *up_adapted = nullptr;  // null: no row has an adapter here
};

class Runner {
 public:
  Runner(Pool& pool, const Kernels& kernels) : pool_(pool), kernels_(kernels), scratch_(pool.threads()) {}
  // Runs all products as one phase: their pieces are distributed together.
  void run(const Gemm* gemms, int count);

 private:
  // A product is pairs of panels times blocks of rows; pieces take all pairs of a block before the next block. Threads start
  // at both ends (pool.h), where pieces are four times as large: long runs of memory are read faster, and a thread knows what
  // to prefetch. Pieces in the middle are small, so that all threads finish at about the same time.
  struct Plan {
    int pairs, row_blocks, tiles_per_block, per_piece, first_piece;
    double seconds;  // estimate per pair
    int long_before = 0, small = 0;  // pieces: long ones, small ones, then long ones again

    int all() const { return pairs * row_blocks; }
    int units() const { return (all() + per_piece - 1) / per_piece; }  // number of pieces if all were small
    int pieces() const { return long_before + small + (units() - kLong * long_before - small + kLong - 1) / kLong; }
    int start(int piece) const {  // index of its first pair over all blocks
      const int middle = std::clamp(piece - long_before, 0, small);
      return std::min(all(), per_piece * (kLong * (piece - middle) + middle));
    }
    static constexpr int kLong = 4;
  };
  Plan plan(const Gemm& gemm) const;
  void cut(std::vector<Plan>& plans) const;
  void piece(const Gemm& gemm, const Plan& plan, int index, int thread);
  void pair(const Gemm& gemm, const Span& span, int thread);
  void gate(const Gemm& gemm, const Span& span, int thread);
  void best(const Gemm& gemm, const Span& span, int thread);
  void take_best_before(const float* x, int size, int place, Best& best) const;
  void product(const Linear& w, const Rows& in, const Span& span, const Sums& to, int thread,
               const AdaptedRows* adapted = nullptr);
  void adapt(const AdaptedRows& adapted, const Linear& w, const Rows& in, const Span& span, const Sums& to,
             const float* before);
  float* room(int thread, int which, int rows);  // scratch [rows][32] of one thread
  static int rows_of(const Rows& in, const Span& span);

  struct Scratch {
    std::vector<float> out[3];
    std::vector<uint8_t> expanded;
  };
  Pool& pool_;
  const Kernels& kernels_;
  std::vector<Scratch> scratch_;
  std::vector<Plan> plans_;
};

}  // namespace tokenmill
