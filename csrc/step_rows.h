// The rows of a step as the scheduler plans them, laid out as the batch that the decoder takes. In Python the same takes
// thirty small calls of array libraries, each of which finds its code gone from the caches after the step before.
//
//   rows        a: start 5, tokens x y z    b: start 0, tokens u v
//   positions   5 6 7 0 1       slots       table[row][position / block size] * block size + position % block size
#pragma once
#include <cstdint>
#include <vector>

#include "decoder.h"

namespace tokenmill {

struct RowTables {  // block ids of all rows there are: [groups][rows][blocks]
  const int32_t* data;
  size_t groups, rows, blocks;
  int block_size;
};

class StepRows {
 public:
  // The hidden states of each row's last wanted[i] tokens leave the model. adapters[i] is the slot of row i's adapter; no
  // entries: none has one. owners[i]: the rank that keeps row i's context; no entries: each rank does. Memory is kept from
  // step to step.
  const BatchView& lay_out(const RowTables& tables, const std::vector<int64_t>& rows,
                           const std::vector<int64_t>& starts, const std::vector<std::vector<int64_t>>& tokens,
                           const std::vector<int64_t>& wanted, const std::vector<int64_t>& adapters,
                           const std::vector<int64_t>& owners);

 private:
  void place(const RowTables& tables, const std::vector<int64_t>& rows);

  std::vector<int64_t> token_ids_, positions_, logit_rows_;
  std::vector<int32_t> query_starts_, context_lens_, adapters_, owners_;
  std::vector<std::vector<int32_t>> block_tables_;  // one a group: [rows of the step][blocks of the longest context]
  std::vector<std::vector<int64_t>> slots_;
  BatchView view_;
};

}  // namespace tokenmill
