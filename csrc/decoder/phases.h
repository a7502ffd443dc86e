// Helpers of the decoder's files: running rows on the pool, and the form in which inputs are kept.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "decoder.h"

namespace tokenmill {

// Calls body(first, end, thread) for pieces of whole tiles of rows, each of some thousand values; small work is done by the
// calling thread.
template <class Body>
void for_tiles(Pool& pool, int rows, int numbers_per_row, int tile, const Body& body) {
  const int per_piece = std::max(1, 8192 / std::max(1, numbers_per_row) / tile) * tile;
  const int pieces = (rows + per_piece - 1) / per_piece;
  pool.run(pieces, [&](int piece, int thread) {
    body(piece * per_piece, std::min(rows, (piece + 1) * per_piece), thread);
  });
}
template <class Body>
void for_rows(Pool& pool, int rows, int numbers_per_row, const Body& body) {
  for_tiles(pool, rows, numbers_per_row, 1, [&](int first, int end, int) {
    for (int r = first; r < end; ++r) body(r);
  });
}

template <class Body>
void Decoder::fill_rows(int tokens, int cols, int work_per_row, Activations& to, const Form& form, const Body& body) {
  to.prepare(tokens, cols, *kernels_, form);
  const bool in_tiles = tokens > kernels_->small_rows;  // few rows: each is a piece
  const int tile = in_tiles ? to.quant().tile : 1;
  for_tiles(pool_, tokens, work_per_row, tile, [&](int first, int end, int thread) {
    Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
    grow(scratch, static_cast<size_t>(tile) * cols);
    for (int t = first; t < end; t += tile) {
      const int rows = std::min(tile, end - t);
      float* values = form.plain ? to.row(t) : scratch.data();
      for (int r = 0; r < rows; ++r) body(t + r, values + static_cast<size_t>(r) * cols);
      if (form.quantised) to.quantise_rows(t, rows, values, *kernels_);
      if (in_tiles && to.marks_outliers()) to.mark_outliers(t / tile, *kernels_);
    }
  });
  if (!in_tiles) mark_outliers(to);
}

// The mean of number(0) ... number(size - 1), from sixteen partial sums in a fixed order.
template <class Number>
float mean_of(int size, const Number& number) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {}, total = 0.0f;
  int i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += number(i + lane);
  for (; i < size; ++i) total += number(i);
  for (const float sum : sums) total += sum;
  return total / static_cast<float>(size);
}

// NF4 and similar matrices are precise enough to expose the error of 8-bit activations: their inputs have 16 bits.
inline float finest(const Linear& reader, float outlier_threshold) {
  return reader.w.kind == Kind::T4 ? 0.0f : outlier_threshold;
}

inline Form Decoder::form_for(std::initializer_list<const Linear*> readers, float outlier_threshold) const {
  for (const Linear* reader : readers) outlier_threshold = finest(*reader, outlier_threshold);
  const auto quantised = std::count_if(readers.begin(), readers.end(), [](const Linear* l) { return l->reads_blocks(); });
  return {quantised > 0, is_adapted_ || static_cast<size_t>(quantised) < readers.size(), outlier_threshold};
}

inline Form Decoder::form_for_all(const std::vector<Linear>& readers, float outlier_threshold) const {
  Form form{false, is_adapted_, outlier_threshold};
  for (const Linear& reader : readers) {
    (reader.reads_blocks() ? form.quantised : form.plain) = true;
    form.outlier_threshold = finest(reader, form.outlier_threshold);
  }
  return form;
}

// The form in which the input of an MLP must be kept.
inline Form Decoder::form_of_input(const Mlp& mlp, float outlier_threshold) const {
  if (!mlp.is_gated()) return form_for({&mlp.up}, outlier_threshold);
  return form_for({&mlp.gate, &mlp.up}, outlier_threshold);
}

}  // namespace tokenmill
