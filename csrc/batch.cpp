// See batch.h.
#include "batch.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace tokenmill {

bool BatchView::wants_all() const {
  if (wanted != tokens) return false;
  for (int i = 0; i < wanted; ++i)
    if (logit_rows[i] != i) return false;
  return true;
}

void NarrowedBatch::take(const BatchView& batch, int group) {
  const GroupView& from = batch.groups[static_cast<size_t>(group)];
  const size_t blocks = static_cast<size_t>(from.max_blocks);
  const size_t wanted = static_cast<size_t>(batch.wanted);
  starts_.resize(wanted + 1);
  std::iota(starts_.begin(), starts_.end(), 0);
  positions_.resize(wanted);
  contexts_.resize(wanted);
  tables_.resize(wanted * blocks);
  for (size_t i = 0; i < wanted; ++i) {
    const int token = static_cast<int>(batch.logit_rows[i]);
    const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + batch.rows + 1, token);
    const ptrdiff_t row = next - batch.query_starts - 1;
    positions_[i] = batch.positions[token];
    contexts_[i] = batch.context_lens[row] - (*next - token - 1);
    std::copy_n(from.block_tables + static_cast<size_t>(row) * blocks, blocks, tables_.data() + i * blocks);
  }
  view = {};
  view.tokens = view.rows = view.wanted = batch.wanted;
  view.positions = positions_.data();
  view.query_starts = starts_.data();
  view.context_lens = contexts_.data();
  view.groups.assign(batch.groups.size(), {tables_.data(), from.max_blocks, nullptr});
}

}  // namespace tokenmill
