// The rows of a step as the decoder takes them, seen through pointers.
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

struct BatchView {  // ForwardBatch of tokenmill/ops/batch.py as pointers
  int tokens = 0, rows = 0, wanted = 0;
  const int64_t* token_ids = nullptr;
  const int64_t* positions = nullptr;
  const int32_t* query_starts = nullptr;
  const int32_t* context_lens = nullptr;
  const int64_t* logit_rows = nullptr;
  const int32_t* adapters = nullptr;  // [tokens], slots of their adapters, 0 for none; null: none has one
  const int32_t* owners = nullptr;    // [rows], the ranks that keep their contexts; null: each rank keeps all of them
  std::vector<GroupView> groups;

  bool wants_all() const;  // every token, in order
};

// The wanted tokens of a batch as rows of one token each, over the contexts that end with them.
class NarrowedBatch {
 public:
  void take(const BatchView& batch, int group);
  void take_tables(const BatchView& batch, int group);  // of one more group, whose entries are read only
  BatchView view;

 private:
  std::vector<int64_t> positions_;
  std::vector<int32_t> starts_, contexts_;
  std::vector<std::vector<int32_t>> tables_;  // of each group, as far as it was taken
};

// Where each rank keeps the contexts of some rows: those of one rank as a batch of their own, and the tokens of all ranks in
// the order of ranks.
//
//   tokens of rows a a b c c   owners 1 0 1   →   rank 0: 2   rank 1: 0 1 3 4   tokens() 2 0 1 3 4   firsts() 0 1 5
class OwnedBatch {
 public:
  void take(const BatchView& batch, int rank, int ranks);
  BatchView view;  // of this rank's rows

  const std::vector<int>& tokens() const { return tokens_; }
  const std::vector<size_t>& firsts() const { return firsts_; }  // where each rank's tokens begin, and where they end
  const std::vector<int>& places() const { return places_; }     // of each token, in `tokens`
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
