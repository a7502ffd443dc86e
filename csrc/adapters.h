// Adapters (LoRA, DoRA): low-rank updates of the products of some rows of a step.
//
//   y = (1 + gain) (W x) + b (a x) + bias         a [rank][cols], b [rows][rank], not quantised; gain for DoRA only
//
// Every matrix that may be adapted is a site. An adapter is stored in a slot (numbered from 1; 0 means no adapter) and has a
// part for some of the sites. Before a product, its inputs are multiplied by `a`, one product per run of rows with the same
// adapter; each piece of the product itself then adds b times the result to its columns. A row's result depends on no other row.
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
    bool is_embedding;  // `a` is [cols][rank], and its rows are looked up
  };
  using Parts = std::vector<std::pair<int, LowRank>>;  // (site, update)

  void declare(int slots, std::vector<Site> sites);
  // Stores an adapter in a slot, replacing its previous one. Throws if a part does not fit its site.
  void put(int slot, Parts parts);
  int slots() const { return static_cast<int>(parts_.size()); }
  const LowRank* find(int slot, int site) const;  // null: the adapter does not change this site

 private:
  std::vector<Site> sites_;
  std::vector<std::vector<std::unique_ptr<LowRank>>> parts_;  // [slot - 1][site], empty slots have no sites
};

}  // namespace tokenmill
