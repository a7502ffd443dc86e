// See batch.h.
#include "batch.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace tokenmill {

bool BatchView::outputs_all() const {
  if (outputs != tokens) return false;
  for (int i = 0; i < outputs; ++i)
    if (logit_rows[i] != i) return false;
  return true;
}

namespace {

ptrdiff_t row_of(const BatchView& batch, int token) {
  const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + batch.rows + 1, token);
  return next - batch.query_starts - 1;
}

}  // namespace

void NarrowedBatch::take(const BatchView& batch, int group) {
  const size_t outputs = static_cast<size_t>(batch.outputs);
  starts_.resize(outputs + 1);
  std::iota(starts_.begin(), starts_.end(), 0);
  positions_.resize(outputs);
  contexts_.resize(outputs);
  for (size_t i = 0; i < outputs; ++i) {
    const int token = static_cast<int>(batch.logit_rows[i]);
    const ptrdiff_t row = row_of(batch, token);
    positions_[i] = batch.positions[token];
    contexts_[i] = batch.context_lens[row] - (batch.query_starts[row + 1] - token - 1);
  }
  view = {};
  view.tokens = view.rows = view.outputs = batch.outputs;
  view.positions = positions_.data();
  view.query_starts = starts_.data();
  view.context_lens = contexts_.data();
  view.groups.assign(batch.groups.size(), {nullptr, 0, nullptr});
  take_tables(batch, group);
}

void NarrowedBatch::take_tables(const BatchView& batch, int group) {
  const GroupView& from = batch.groups[static_cast<size_t>(group)];
  const size_t blocks = static_cast<size_t>(from.max_blocks);
  tables_.resize(std::max(tables_.size(), batch.groups.size()));
  std::vector<int32_t>& tables = tables_[static_cast<size_t>(group)];
  tables.resize(static_cast<size_t>(batch.outputs) * blocks);
  for (int i = 0; i < batch.outputs; ++i) {
    const size_t row = static_cast<size_t>(row_of(batch, static_cast<int>(batch.logit_rows[i])));
    std::copy_n(from.block_tables + row * blocks, blocks, tables.data() + static_cast<size_t>(i) * blocks);
  }
  view.groups[static_cast<size_t>(group)] = {tables.data(), from.max_blocks, nullptr};
}

void OwnedBatch::take(const BatchView& batch, int rank, int ranks) {
  tokens_.clear();
  firsts_.assign(1, 0);
  for (int owner = 0; owner < ranks; ++owner) {
    for (int r = 0; r < batch.rows; ++r)
      if (batch.owners[r] == owner)
        for (int t = batch.query_starts[r]; t < batch.query_starts[r + 1]; ++t) tokens_.push_back(t);
    firsts_.push_back(tokens_.size());
  }
  places_.resize(tokens_.size());
  for (size_t i = 0; i < tokens_.size(); ++i) places_[static_cast<size_t>(tokens_[i])] = static_cast<int>(i);
  own_first_ = firsts_[static_cast<size_t>(rank)];
  std::vector<int> rows;
  positions_.clear();
  contexts_.clear();
  starts_.assign(1, 0);
  for (int r = 0; r < batch.rows; ++r) {
    if (batch.owners[r] != rank) continue;
    rows.push_back(r);
    for (int t = batch.query_starts[r]; t < batch.query_starts[r + 1]; ++t) positions_.push_back(batch.positions[t]);
    starts_.push_back(static_cast<int32_t>(positions_.size()));
    contexts_.push_back(batch.context_lens[r]);
  }
  view = {};
  view.tokens = static_cast<int>(positions_.size());
  view.rows = static_cast<int>(rows.size());
  view.positions = positions_.data();
  view.query_starts = starts_.data();
  view.context_lens = contexts_.data();
  tables_.resize(batch.groups.size());
  slots_.resize(batch.groups.size());
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    const GroupView& from = batch.groups[g];
    const size_t blocks = static_cast<size_t>(from.max_blocks);
    tables_[g].clear();
    slots_[g].clear();
    for (const int r : rows) {
      const int32_t* table = from.block_tables + static_cast<size_t>(r) * blocks;
      tables_[g].insert(tables_[g].end(), table, table + blocks);
      slots_[g].insert(slots_[g].end(), from.slots + batch.query_starts[r], from.slots + batch.query_starts[r + 1]);
    }
    view.groups.push_back({tables_[g].data(), from.max_blocks, slots_[g].data()});
  }
}

}  // namespace tokenmill
