// Tensor parallelism: several ranks compute a step together, each with some rows of the matrices. The ranks' parts of a
// product are gathered before they are read; between two products all ranks have the same values.
//
//   run            products with cut matrices → columns of all ranks
//   exchange_rows  expert parallelism: outputs of the ranks' experts → rows of all ranks
//   gather_heads   attention with the ranks' own heads → columns of all ranks
//   share_heads    data-parallel attention: outputs of the ranks' rows → rows of all ranks
//   embed_rows     looked-up rows of tables whose rows are cut over the ranks
//   gather_best    argmax of each rank's logits → argmax of all
#include <algorithm>
#include <cstring>

#include "decoder/phases.h"

namespace tokenmill {

// Runs the products of a phase and gathers the columns of matrices that are cut.
void Decoder::run(const Gemm* gemms, int count) {
  const bool any_cut = std::any_of(gemms, gemms + count, [](const Gemm& g) { return g.w->is_cut(); });
  if (any_cut) run_cut(gemms, count);
  else run_own(gemms, count);
}

void Decoder::run_cut(const Gemm* gemms, int count) {
  std::vector<Gemm> own(gemms, gemms + count);
  std::vector<Gathered> parts;
  cut_rows_.resize(std::max(cut_rows_.size(), own.size()));
  for (size_t g = 0; g < own.size(); ++g) {
    Gemm& gemm = own[g];
    if (!gemm.w->is_cut() || gemm.mode == Gemm::Mode::Best) continue;
    const int rows = gemm.in.quant.rows;
    const std::vector<int>* borders = &gemm.w->borders;
    if (gemm.mode != Gemm::Mode::Gate) {
      parts.push_back({gemm.out, gemm.out_stride, rows, borders});
      gemm.out += gemm.w->first;
      continue;
    }
    // Values are exchanged before they are quantised: a quantisation block may span two ranks.
    const size_t width = static_cast<size_t>(gemm.w->rows());
    if (gemm.gated->is_quantised()) {
      cut_rows_[g].prepare(rows, gemm.w->rows(), *kernels_, {false, true, gemm.gated->form().outlier_threshold});
      gemm.gated = &cut_rows_[g];
    }
    parts.push_back({gemm.gated->row(0), width, rows, borders});
  }
  run_own(own.data(), count);
  gather(parts);
  for (size_t g = 0; g < own.size(); ++g) {
    if (own[g].gated == gemms[g].gated) continue;
    const int width = own[g].w->rows();
    fill_rows(own[g].in.quant.rows, width, 2 * width, *gemms[g].gated, gemms[g].gated->form(), [&](int t, float* out) {
      std::copy_n(cut_rows_[g].row(t), width, out);
    });
  }
}

// Gathers in as many exchanges as the size of the window's buffers requires, each of some rows of some parts.
void Decoder::gather(const std::vector<Gathered>& parts) {
  const size_t room = window_->room_bytes() / sizeof(float);
  std::vector<Gathered> round;
  size_t used = 0;
  const auto finish = [&] {
    if (!round.empty()) gather_round(round);
    round.clear();
    used = 0;
  };
  for (const Gathered& part : parts) {
    size_t widest = 1;
    for (size_t r = 0; r + 1 < part.borders->size(); ++r)
      widest = std::max(widest, static_cast<size_t>((*part.borders)[r + 1] - (*part.borders)[r]));
    if (widest > room) throw std::invalid_argument("the ranks' window is smaller than a row");
    for (int row = 0; row < part.rows;) {
      if (room - used < widest) finish();
      const int count = static_cast<int>(std::min<size_t>(static_cast<size_t>(part.rows - row), (room - used) / widest));
      round.push_back({part.data + static_cast<size_t>(row) * part.stride, part.stride, count, part.borders});
      used += static_cast<size_t>(count) * widest;
      row += count;
    }
  }
  finish();
}

// One exchange: writes this rank's columns of all parts, then reads the others'.
void Decoder::gather_round(const std::vector<Gathered>& parts) {
  const auto each = [&](int rank, const auto& copy) {
    size_t at = 0;
    for (const Gathered& part : parts) {
      const size_t column = static_cast<size_t>((*part.borders)[static_cast<size_t>(rank)]);
      const size_t width = static_cast<size_t>((*part.borders)[static_cast<size_t>(rank) + 1]) - column;
      for_rows(pool_, part.rows, static_cast<int>(width), [&, at](int t) {
        copy(part.data + static_cast<size_t>(t) * part.stride + column, at + static_cast<size_t>(t) * width, width);
      });
      at += static_cast<size_t>(part.rows) * width;
    }
  };
  float* own = reinterpret_cast<float*>(window_->own());
  each(window_->rank(), [&](const float* from, size_t at, size_t width) { std::copy_n(from, width, own + at); });
  window_->meet();
  for (int rank = 0; rank < window_->size(); ++rank) {
    if (rank == window_->rank()) continue;
    const float* theirs = reinterpret_cast<const float*>(window_->of(rank));
    each(rank, [&](float* to, size_t at, size_t width) { std::copy_n(theirs + at, width, to); });
  }
  window_->next_turn();
}

// Gathers the heads' outputs of all ranks, in the form that `o` reads.
void Decoder::gather_heads(const Layer& layer, int tokens) {
  const size_t own = static_cast<size_t>(heads_.cols()), width = static_cast<size_t>(layer.head_borders.back());
  const size_t first = static_cast<size_t>(layer.head_borders[static_cast<size_t>(window_->rank())]);
  grow(gathered_heads_, static_cast<size_t>(tokens) * width);
  for_rows(pool_, tokens, heads_.cols(), [&](int t) {
    std::copy_n(heads_.row(t), own, gathered_heads_.data() + static_cast<size_t>(t) * width + first);
  });
  gather({{gathered_heads_.data(), width, tokens, &layer.head_borders}});
  fill_rows(tokens, static_cast<int>(width), 2 * static_cast<int>(width), whole_heads_,
            form_for({&layer.o}, outlier_threshold(layer)), [&](int t, float* out) {
    std::copy_n(gathered_heads_.data() + static_cast<size_t>(t) * width, width, out);
  });
  std::swap(heads_, whole_heads_);
}

// Keeps the rows of the tokens whose contexts this rank caches, packed together.
void Decoder::keep_own(PageVector<float>& rows, size_t width) {
  grow(kept_rows_, rows.size());
  const int* tokens = owned_.own_tokens();
  for_rows(pool_, owned_.view.tokens, static_cast<int>(width), [&](int i) {
    std::copy_n(rows.data() + static_cast<size_t>(tokens[i]) * width, width, kept_rows_.data() + static_cast<size_t>(i) * width);
  });
  std::swap(rows, kept_rows_);
}

// Gathers the attention outputs of all ranks' rows, in the form that `o` reads and in the order of the tokens.
void Decoder::share_heads(const Layer& layer, size_t width) {
  const size_t tokens = owned_.tokens().size();
  const size_t first = owned_.firsts()[static_cast<size_t>(window_->rank())];
  grow(gathered_heads_, tokens * width);
  for_rows(pool_, owned_.view.tokens, static_cast<int>(width), [&](int i) {
    std::copy_n(heads_.row(i), width, gathered_heads_.data() + (first + static_cast<size_t>(i)) * width);
  });
  exchange_rows(gathered_heads_.data(), owned_.firsts(), width);
  fill_rows(static_cast<int>(tokens), static_cast<int>(width), 2 * static_cast<int>(width), whole_heads_,
            form_for({&layer.o}, outlier_threshold(layer)), [&](int t, float* out) {
    const size_t place = static_cast<size_t>(owned_.places()[static_cast<size_t>(t)]);
    std::copy_n(gathered_heads_.data() + place * width, width, out);
  });
  std::swap(heads_, whole_heads_);
}

// Looks up rows of a table, times a factor. Each rank sends those of its rows that `ids` names, in that order.
void Decoder::embed_rows(const Linear& table, const int64_t* ids, int count, float scale, float* out) {
  const size_t width = static_cast<size_t>(table.w.cols);
  const auto embed_one = [&](int i) {
    kernels_->embed(table.w, static_cast<int>(ids[i]) - table.first, scale, out + static_cast<size_t>(i) * width);
  };
  if (!table.is_cut()) return for_rows(pool_, count, 8 * table.w.cols, embed_one);
  const auto owner = [&](int i) {
    const auto next = std::upper_bound(table.borders.begin(), table.borders.end(), static_cast<int>(ids[i]));
    return static_cast<int>(next - table.borders.begin()) - 1;
  };
  const int at_once = static_cast<int>(window_->room_bytes() / sizeof(float) / width);
  if (at_once == 0) throw std::invalid_argument("the ranks' window is smaller than a row");
  for (int first = 0; first < count; first += at_once) {
    const int end = std::min(count, first + at_once);
    float* own = reinterpret_cast<float*>(window_->own());
    for (int i = first; i < end; ++i) {
      if (owner(i) != window_->rank()) continue;
      embed_one(i);
      own = std::copy_n(out + static_cast<size_t>(i) * width, width, own);
    }
    window_->meet();
    std::vector<size_t> taken(static_cast<size_t>(window_->size()), 0);
    for (int i = first; i < end; ++i) {
      const int rank = owner(i);
      const size_t at = taken[static_cast<size_t>(rank)]++ * width;
      if (rank == window_->rank()) continue;
      std::copy_n(reinterpret_cast<const float*>(window_->of(rank)) + at, width, out + static_cast<size_t>(i) * width);
    }
    window_->next_turn();
  }
}

// Exchanges rows of which each rank has computed some: those from first[rank] on.
void Decoder::exchange_rows(float* rows, const std::vector<size_t>& first, size_t width) {
  const size_t at_once = window_->room_bytes() / sizeof(float) / width;
  if (at_once == 0) throw std::invalid_argument("the ranks' window is smaller than a row");
  size_t most = 0;
  for (size_t rank = 0; rank + 1 < first.size(); ++rank) most = std::max(most, first[rank + 1] - first[rank]);
  for (size_t done = 0; done < most; done += at_once) {
    const auto part = [&](int rank, const auto& copy) {
      const size_t count = first[static_cast<size_t>(rank) + 1] - first[static_cast<size_t>(rank)];
      if (done < count) copy(rows + (first[static_cast<size_t>(rank)] + done) * width, std::min(at_once, count - done) * width);
    };
    part(window_->rank(), [&](const float* from, size_t size) {
      std::copy_n(from, size, reinterpret_cast<float*>(window_->own()));
    });
    window_->meet();
    for (int rank = 0; rank < window_->size(); ++rank)
      if (rank != window_->rank())
        part(rank, [&](float* to, size_t size) {
          std::copy_n(reinterpret_cast<const float*>(window_->of(rank)), size, to);
        });
    window_->next_turn();
  }
}

void Decoder::gather_best(std::vector<Best>& best) {
  const size_t at_once = window_->room_bytes() / sizeof(Best);
  for (size_t first = 0; first < best.size(); first += at_once) {
    const size_t count = std::min(at_once, best.size() - first);
    std::memcpy(window_->own(), best.data() + first, count * sizeof(Best));
    window_->meet();
    for (int rank = 0; rank < window_->size(); ++rank) {
      if (rank == window_->rank()) continue;
      const Best* theirs = reinterpret_cast<const Best*>(window_->of(rank));
      for (size_t i = 0; i < count; ++i) best[first + i].take(theirs[i]);
    }
    window_->next_turn();
  }
}

}  // namespace tokenmill
