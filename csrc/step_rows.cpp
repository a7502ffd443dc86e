#include "step_rows.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace tokenmill {

const BatchView& StepRows::lay_out(const RowTables& tables, const std::vector<int64_t>& rows,
                                   const std::vector<int64_t>& starts,
                                   const std::vector<std::vector<int64_t>>& tokens,
                                   const std::vector<int64_t>& num_outputs, const std::vector<int64_t>& adapters,
                                   const std::vector<int64_t>& owners) {
  if (starts.size() != rows.size() || tokens.size() != rows.size() || num_outputs.size() != rows.size() ||
      (!adapters.empty() && adapters.size() != rows.size()) || (!owners.empty() && owners.size() != rows.size()))
    throw std::invalid_argument("the lists of the rows do not fit together");
  token_ids_.clear();
  positions_.clear();
  logit_rows_.clear();
  context_lens_.clear();
  query_starts_.assign(1, 0);
  adapters_.clear();
  owners_.assign(owners.begin(), owners.end());
  const int64_t longest = std::min<int64_t>(static_cast<int64_t>(tables.blocks) * tables.block_size,
                                            std::numeric_limits<int32_t>::max());
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t count = static_cast<int64_t>(tokens[i].size());
    if (rows[i] < 0 || rows[i] >= static_cast<int64_t>(tables.rows) || starts[i] < 0 || num_outputs[i] < 0 ||
        num_outputs[i] > count || starts[i] > longest - count)
      throw std::invalid_argument("a row has no block table, or one too short for its tokens");
    const int64_t end = starts[i] + count;
    token_ids_.insert(token_ids_.end(), tokens[i].begin(), tokens[i].end());
    for (int64_t position = starts[i]; position < end; ++position) positions_.push_back(position);
    const int64_t all = static_cast<int64_t>(token_ids_.size());
    for (int64_t at = all - num_outputs[i]; at < all; ++at) logit_rows_.push_back(at);
    query_starts_.push_back(static_cast<int32_t>(all));
    context_lens_.push_back(static_cast<int32_t>(end));
    if (!adapters.empty()) adapters_.insert(adapters_.end(), tokens[i].size(), static_cast<int32_t>(adapters[i]));
  }
  place(tables, rows);
  return view_;
}

void StepRows::place(const RowTables& tables, const std::vector<int64_t>& rows) {
  const int longest = rows.empty() ? 0 : *std::max_element(context_lens_.begin(), context_lens_.end());
  const size_t size = static_cast<size_t>(tables.block_size), blocks = (static_cast<size_t>(longest) + size - 1) / size;
  block_tables_.resize(tables.groups);
  slots_.resize(tables.groups);
  view_.groups.clear();
  for (size_t group = 0; group < tables.groups; ++group) {
    std::vector<int32_t>& table = block_tables_[group];
    std::vector<int64_t>& slots = slots_[group];
    table.resize(rows.size() * blocks);
    slots.resize(token_ids_.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t* from = tables.data + (group * tables.rows + static_cast<size_t>(rows[i])) * tables.blocks;
      std::copy_n(from, blocks, table.data() + i * blocks);
      for (int32_t t = query_starts_[i]; t < query_starts_[i + 1]; ++t) {
        const size_t position = static_cast<size_t>(positions_[static_cast<size_t>(t)]);
        slots[static_cast<size_t>(t)] = from[position / size] * static_cast<int64_t>(size) + position % size;
      }
    }
    view_.groups.push_back({table.data(), static_cast<int>(blocks), slots.data()});
  }
  view_.tokens = static_cast<int>(token_ids_.size());
  view_.rows = static_cast<int>(rows.size());
  view_.outputs = static_cast<int>(logit_rows_.size());
  view_.token_ids = token_ids_.data();
  view_.positions = positions_.data();
  view_.query_starts = query_starts_.data();
  view_.context_lens = context_lens_.data();
  view_.logit_rows = logit_rows_.data();
  view_.adapters = adapters_.empty() ? nullptr : adapters_.data();
  view_.owners = owners_.empty() ? nullptr : owners_.data();
}

}  // namespace tokenmill
