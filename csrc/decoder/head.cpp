// The head: logits of the output tokens, or only the argmax of each.
#include <limits>
#include <stdexcept>

#include "decoder/phases.h"

namespace tokenmill {

Rows Decoder::head_input(const float* hidden, int rows) {
  if (head_.w.data == nullptr) throw std::invalid_argument("this decoder has no head");
  threshold_now_ = threshold_at_end();
  normed_.prepare(rows, hidden_, *kernels_, form_for({&head_}, threshold_now_));
  for_rows(pool_, rows, hidden_, [&](int r) {
    normed_.put_row(r, hidden + static_cast<size_t>(r) * hidden_, *kernels_);
  });
  mark_outliers(normed_);
  return normed_.view();
}

void Decoder::logits(const float* hidden, int rows, const int32_t* slots, float* out) {
  if (rows == 0) return;
  const std::vector<int32_t> own(slots, slots == nullptr ? slots : slots + rows);  // `slots` may be this decoder's buffer
  take_adapters(slots == nullptr ? nullptr : own.data(), rows);
  const Gemm head{&head_, nullptr, head_input(hidden, rows), Gemm::Mode::Store, out, static_cast<size_t>(vocab_)};
  run(&head, 1);
  if (logit_scale_ != 1.0f || logit_softcap_ > 0.0f)
    for_rows(pool_, rows, vocab_, [&](int r) {
      float* row = out + static_cast<size_t>(r) * vocab_;
      if (logit_scale_ != 1.0f) kernels_->scale(row, logit_scale_, vocab_);
      if (logit_softcap_ > 0.0f) kernels_->softcap(row, logit_softcap_, vocab_);
    });
}

void Decoder::best_logits(const float* hidden, int rows, const int32_t* slots, int64_t* places, float* values) {
  if (rows == 0) return;
  const std::vector<int32_t> own(slots, slots == nullptr ? slots : slots + rows);
  take_adapters(slots == nullptr ? nullptr : own.data(), rows);
  const size_t threads = static_cast<size_t>(pool_.threads()), count = static_cast<size_t>(rows);
  best_.assign(threads * count, Best{});
  Gemm head{&head_, nullptr, head_input(hidden, rows), Gemm::Mode::Best};
  head.best = best_.data();
  head.softcap = logit_softcap_;
  head.scale = logit_scale_;
  run(&head, 1);
  for (size_t r = 0; r < count; ++r) {
    for (size_t t = 1; t < threads; ++t) best_[r].take(best_[t * count + r]);
    best_[r].place += head_.first;
  }
  best_.resize(count);
  if (head_.is_cut()) gather_best(best_);
  for (size_t r = 0; r < count; ++r) {
    places[r] = best_[r].place;
    values[r] = best_[r].has_nan ? std::numeric_limits<float>::quiet_NaN() : best_[r].value;
  }
}

}  // namespace tokenmill
