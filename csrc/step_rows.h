// Builds the decoder's batch from the rows of a step as the scheduler plans them. In Python the same takes thirty small calls
// of array libraries, whose code the previous step has evicted from the caches.
//
//   rows        a: start 5, tokens x y z    b: start 0, tokens u v
//   positions   5 6 7 0 1       slots       table[row][position / block size] * block size + position % block size
#pragma once
#include <cstdint>
#include <vector>

#include "decoder.h"

namespace tokenmill {

struct RowTables {  // block ids of all permanent rows: [groups][rows][blocks]
  const int32_t* data;
  size_t groups, rows, blocks;
  int block_size;
};

class StepRows {
 public:
  // num_outputs[i]: how many of row i's last tokens are outputs. adapters[i]: row i's adapter slot; empty: no row has one.
  // owners[i]: the rank that caches row i's context; empty: all ranks do. Memory is reused between steps.
  const BatchView& lay_out(const RowTables& tables, const std::vector<int64_t>& rows,
                           const std::vector<int64_t>& starts, const std::vector<std::vector<int64_t>>& tokens,
                           const std::vector<int64_t>& num_outputs, const std::vector<int64_t>& adapters,
                           const std::vector<int64_t>& owners);

 private:
  void place(const RowTables& tables, const std::vector<int64_t>& rows);

  std::vector<int64_t> token_ids_, positions_, logit_rows_;
  std::vector<int32_t> query_starts_, context_lens_, adapters_, owners_;
  std::vector<std::vector<int32_t>> block_tables_;  // per group: [rows of the step][blocks of the longest context]
  std::vector<std::vector<int64_t>> slots_;
  BatchView view_;
};

}  // namespace tokenmill
