// The rows of a step as the decoder takes them, seen through pointers.
#pragma once
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

}  // namespace tokenmill
