// Matrix products of a step cut into pieces for the pool. A piece is some pairs of panels (32 outputs) times a block of
// rows; what becomes of the 32 numbers of a row (stored, added to the residual, gated and quantised for the next
// product, compared with the best so far) is done while they are still in the first-level cache.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "kernels.h"
#include "pages.h"
#include "pool.h"

namespace tokenmill {

// A matrix of which this rank may have some rows only, where several compute a model together: then `w` and `bias` are
// those of rows [first, first + w.rows), and rank r has [borders[r], borders[r + 1]).
struct Linear {
  Matrix w;
  std::vector<float> bias;  // empty: none
  int site = -1;  // its number among those that adapters may change; -1: none may
  std::vector<int> borders = {};  // empty: this rank has all that it multiplies with
  int first = 0;

  bool is_cut() const { return !borders.empty(); }
  // What its input is kept as: rounded in blocks of columns, unless these stand in an order of their own.
  bool reads_blocks() const { return is_quantised(w.kind) && !w.is_ordered; }
  int rows() const { return borders.empty() ? w.rows : borders.back(); }  // of all ranks
};

// What an adapter adds to the product with one matrix, see adapters.h.
struct LowRank {
  Linear a;
  Matrix b;
  std::vector<float> gain;  // empty: none
};

// The adapters of a product's rows.
struct AdaptedRows {
  std::vector<const LowRank*> parts;  // [rows], null: none
  std::vector<size_t> at;             // [rows]: where the row's product with `a` lies
  const float* shrunk = nullptr;
};

// out [rows of b] += b shrunk
inline void add_low_rank(const LowRank& part, const float* shrunk, const Kernels& kernels, int panel, int panels, float* out) {
  Rows in{shrunk, static_cast<size_t>(part.b.cols), {}};
  in.quant.rows = 1;
  kernels.linear(part.b, in, {panel, panels, 0, 1, -1}, {out, 0, true}, nullptr);
}
void add_low_rank(const LowRank& part, const float* shrunk, const Kernels& kernels, float* out);

// What is kept of activations. Of quantised ones the blocks whose largest number is more than `outlier_threshold` times the
// row's mean (the quadratic one, of all blocks) have 16 bits, the others 8: infinity is 8 bits everywhere, 0 is 16.
struct Form {
  bool quantised, plain;
  float outlier_threshold;
};

// Activations with their own memory, kept from step to step.
class Activations {
 public:
  // Room for `rows` rows of `cols` numbers, in tiles (see QuantRows).
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
  void put_row(int r, const float* values, const Kernels& kernels);  // in all forms
  // Once all rows of tile t are quantised: lists the blocks whose remainders count.
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
  Activations* gated = nullptr;  // Gate: where act(gate) * up goes, at the columns of w's rows; plain where w is cut
  Best* best = nullptr;  // Best: [threads][rows], of what each thread computed
  float softcap = 0.0f;  // Best: 0: none
  float scale = 1.0f;  // Best: multiplies what is compared, before it is capped
  std::optional<Rows> up_in = {};  // Gate: what `up` reads, where it is not the same
  const int32_t* slots = nullptr;  // [rows], of their adapters; null: rows are those of the step
  const AdaptedRows *adapted = nullptr, *up_adapted = nullptr;  // null: none is
};

class Runner {
 public:
  Runner(Pool& pool, const Kernels& kernels) : pool_(pool), kernels_(kernels), scratch_(pool.threads()) {}
  // All products are one phase: their pieces are handed out together.
  void run(const Gemm* gemms, int count);

 private:
  // A product is pairs of panels times blocks of rows; a piece is some of these, all pairs of a block before the next
  // block. Threads begin at both ends (pool.h), where pieces are four times as large, since memory is read faster in long
  // runs and a thread knows what to fetch next; where they meet are small ones, so that all threads end together.
  struct Plan {
    int pairs, row_blocks, tiles_per_block, per_piece, first_piece;
    double seconds;  // of one pair, roughly
    int long_before = 0, small = 0;  // pieces; long ones again behind these

    int all() const { return pairs * row_blocks; }
    int units() const { return (all() + per_piece - 1) / per_piece; }  // small pieces, if there were no others
    int pieces() const { return long_before + small + (units() - kLong * long_before - small + kLong - 1) / kLong; }
    int start(int piece) const {  // the first of its pairs, counted through all blocks
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
  float* room(int thread, int which, int rows);  // [rows][32] of a thread's own
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
