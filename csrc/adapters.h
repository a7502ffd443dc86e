// Adapters: what is added to the products of some rows of a step.
//
//   y = (1 + gain) (W x) + b (a x) + bias         a [rank][cols], b [rows][rank], plain numbers; gain only DoRA's
//
// Every matrix that may be adapted is a site. An adapter lies in a slot (from 1 on; 0 is none) and has a part for some of
// the sites. Before a product its inputs are multiplied by the a's, one product for each run of rows with the same adapter;
// the pieces of the product itself then add b times that to their own columns. A row's result depends on no other row.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "gemm.h"

namespace tokenmill {

class AdapterSlots {
 public:
  struct Site {
    int rows, cols;
    bool is_embedding;  // a is [cols][rank]: a row of it is looked up
  };
  using Parts = std::vector<std::pair<int, LowRank>>;  // site, what is added there

  void declare(int slots, std::vector<Site> sites);
  // The adapter of a slot, in place of the one that it holds. Throws where a part does not fit its site.
  void put(int slot, Parts parts);
  int slots() const { return static_cast<int>(parts_.size()); }
  const LowRank* find(int slot, int site) const;  // null: nothing is added

 private:
  std::vector<Site> sites_;
  std::vector<std::vector<std::unique_ptr<LowRank>>> parts_;  // [slot - 1][site], empty slots have no sites
};

}  // namespace tokenmill
