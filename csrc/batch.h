// The batch of a step: ForwardBatch of tokenmill/ops/batch.py as pointers, and parts of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tokenmill {

struct GroupView {
  const int32_t* block_tables;  // [rows][max_blocks]
  int max_blocks;
  const int64_t* slots;  // [tokens]
};

struct BatchView {
  int tokens = 0, rows = 0, outputs = 0;
  const int64_t* token_ids = nullptr;
  const int64_t* positions = nullptr;
  const int32_t* query_starts = nullptr;
  const int32_t* context_lens = nullptr;
  const int64_t* logit_rows = nullptr;
  const int32_t* adapters = nullptr;  // [tokens] adapter slots, 0 for none; null: no token has an adapter
  const int32_t* owners = nullptr;    // [rows] the rank that caches each row's context; null: all ranks do
  std::vector<GroupView> groups;

  bool outputs_all() const;  // whether all tokens are outputs, in order
};

// The output tokens of a batch as rows of one token each, whose contexts end with that token.
class NarrowedBatch {
 public:
  void take(const BatchView& batch, int group);
  void take_tables(const BatchView& batch, int group);  // adds the tables of another group, which is only read
  BatchView view;

 private:
  std::vector<int64_t> positions_;
  std::vector<int32_t> starts_, contexts_;
  std::vector<std::vector<int32_t>> tables_;  // per group that was taken
};

// Data-parallel attention, where each rank caches the contexts of some rows: one rank's rows as a batch, and the tokens of
// all ranks sorted by rank.
//
//   tokens of rows a a b c c   owners 1 0 1   →   rank 0: 2   rank 1: 0 1 3 4   tokens() 2 0 1 3 4   firsts() 0 1 5
class OwnedBatch {
 public:
  void take(const BatchView& batch, int rank, int ranks);
  BatchView view;  // of this rank's rows

  const std::vector<int>& tokens() const { return tokens_; }
  const std::vector<size_t>& firsts() const { return firsts_; }  // [ranks + 1] where each rank's tokens begin in `tokens`
  const std::vector<int>& places() const { return places_; }     // each token's index in `tokens`
  const int* own_tokens() const { return tokens_.data() + own_first_; }

 private:
  std::vector<int> tokens_, places_;
  std::vector<size_t> firsts_;
  size_t own_first_ = 0;
  std::vector<int64_t> positions_;
  std::vector<int32_t> starts_, contexts_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::vector<int64_t>> slots_;
};

}  // namespace tokenmill
