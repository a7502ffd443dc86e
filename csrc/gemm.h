// Matrix products of a step cut into pieces for the pool. A piece is some pairs of panels (32 outputs) times a block of
// rows; what becomes of the 32 numbers of a row (stored, added to the residual, gated and quantised for the next
// product) is done while they are still in the first-level cache.
#pragma once
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace tokenmill {

struct Linear {
  Matrix w;
  std::vector<float> bias;  // empty: none
};

// Activations with their own memory, kept from step to step.
class Activations {
 public:
  // 1 or 2 bytes for a quantised number; before anything is prepared.
  void set_parts(int parts) { quant_.parts = parts; }
  // Room for `rows` rows of `cols` numbers. Tiles of `tile` rows (see QuantRows).
  void prepare(int rows, int cols, const Kernels& kernels, bool quantised, bool plain);
  Rows view() const;
  float* row(int r) { return values_.data() + static_cast<size_t>(r) * cols_; }
  const QuantRows& quant() const { return quant_; }
  bool is_quantised() const { return quantised_; }
  bool is_plain() const { return plain_; }
  int cols() const { return cols_; }
  // Takes 32 columns of a row, already in their final values.
  void put_block(int r, int block, const float* values, int count, const Kernels& kernels);
  void quantise_row(int r, const Kernels& kernels) { kernels.quantise_row(row(r), cols_, quant_, r); }

 private:
  int cols_ = 0;
  bool quantised_ = false, plain_ = false;
  std::vector<float> values_;
  std::vector<uint8_t> records_;
  QuantRows quant_;
};

struct Gemm {
  enum class Mode : uint8_t { Store, Add, Gate };
  const Linear* w = nullptr;
  const Linear* up = nullptr;  // Gate: w is the gate
  Rows in;
  Mode mode = Mode::Store;
  float* out = nullptr;  // Store, Add: [rows][out_stride]
  size_t out_stride = 0;
  Activation activation = Activation::Silu;
  Activations* gated = nullptr;  // Gate: where act(gate) * up goes
};

class Runner {
 public:
  Runner(Pool& pool, const Kernels& kernels) : pool_(pool), kernels_(kernels), scratch_(pool.threads()) {}
  // All products are one phase: their pieces are handed out together.
  void run(const Gemm* gemms, int count);

 private:
  struct Plan {
    int pairs, row_blocks, tiles_per_block, pairs_per_piece, first_piece;
  };
  Plan plan(const Gemm& gemm, int first_piece) const;
  void piece(const Gemm& gemm, const Plan& plan, int index, int thread);
  void pair(const Gemm& gemm, const Span& span, int thread);
  void gate(const Gemm& gemm, const Span& span, int thread);
  void product(const Linear& w, const Rows& in, const Span& span, const Sums& to, int thread);
  float* room(int thread, int which, int rows);  // [rows][32] of a thread's own
  static int rows_of(const Rows& in, const Span& span);

  struct Scratch {
    std::vector<float> out[2];
    std::vector<uint8_t> expanded;
  };
  Pool& pool_;
  const Kernels& kernels_;
  std::vector<Scratch> scratch_;
  std::vector<Plan> plans_;
};

}  // namespace tokenmill
