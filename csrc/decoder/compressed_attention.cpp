// Attention over a sliding window and compressed entries (DeepSeek V4): one key per token for all heads, which is also the
// value, and entries that each compress several tokens (see tokenmill/arch/compressed.py).
//
//   norm → query latent, key, values and gates of entries → (norm, rotate, write to the cache; compute complete entries)
//   latent → queries → attend to the keys of the window, and to entries → rotate back → groups of heads → o
//
// An entry is stored in the block of its own tokens: a block holds fewer, wider entries. An indexer's keys are entries too.
// RoPE rotates neighbouring pairs of a head's last dimensions.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "decoder/phases.h"

namespace tokenmill {
namespace {

constexpr int kHeadTile = 16;  // heads of a token that one piece computes

size_t padded16(int size) { return static_cast<size_t>((size + 15) / 16 * 16); }

const int32_t* table_of(const BatchView& batch, int group, int row) {
  const GroupView& view = batch.groups[static_cast<size_t>(group)];
  return view.block_tables + static_cast<size_t>(row) * view.max_blocks;
}

}  // namespace

void Decoder::attend_compressed(const Layer& layer, const BatchView& batch) {
  project_compressed(layer, batch);
  place_compressed(layer, batch);
  compressed_outputs(layer, batch);
}

void Decoder::project_compressed(const Layer& layer, const BatchView& batch) {
  project_to(layer.compressed->in, layer, batch.tokens);
}

// Rotates a head's last dimensions by the angle of a position, or back (direction -1).
void Decoder::turn(const Layer& layer, int64_t position, float direction, float* values, int dim) const {
  const RopeTable& rope = ropes_[static_cast<size_t>(layer.rope)];
  const float* cos = rope.cos.data() + static_cast<size_t>(position) * rope.half;
  const float* sin = rope.sin.data() + static_cast<size_t>(position) * rope.half;
  float* pairs = values + dim - 2 * rope.half;
  for (int i = 0; i < rope.half; ++i) {
    const float first = pairs[2 * i], second = pairs[2 * i + 1], by = direction * sin[i];
    pairs[2 * i] = first * cos[i] - second * by;
    pairs[2 * i + 1] = second * cos[i] + first * by;
  }
}

// Writes every token's key and the inputs of entries, then computes the entries that these tokens complete.
void Decoder::place_compressed(const Layer& layer, const BatchView& batch) {
  const CompressedAttention& mixer = *layer.compressed;
  const int dim = mixer.head_dim(), key_at = mixer.in[0].rows();
  const size_t stride = projected_width(layer);
  for_rows(pool_, batch.tokens, 2 * static_cast<int>(stride), [&](int t) {
    float* row = projected_.data() + static_cast<size_t>(t) * stride;
    float* key = row + key_at;
    kernels_->rms_norm(key, mixer.kv_norm.data(), mixer.eps, dim, key);
    turn(layer, batch.positions[t], 1.0f, key, dim);
    kernels_->write_entry(mixer.keys, batch.groups[static_cast<size_t>(layer.group)].slots[t], key);
    const float* from = key + dim;
    const auto keep = [&](const CompressedEntries& of) {
      const size_t width = 2 * static_cast<size_t>(mixer.series()) * of.entries.width;
      const int64_t slot = batch.groups[static_cast<size_t>(of.inputs_group)].slots[t];
      std::copy_n(from, width, of.inputs + static_cast<size_t>(slot) * width);
      from += width;
    };
    if (mixer.rate) keep(mixer.compressed);
    if (mixer.index) keep(mixer.index->keys);
  });
  if (mixer.rate) make_entries(layer, batch);
}

void Decoder::make_entries(const Layer& layer, const BatchView& batch) {
  const CompressedAttention& mixer = *layer.compressed;
  std::vector<std::pair<int, int>> made;  // (row, entry number)
  for (int r = 0; r < batch.rows; ++r) {
    const int end = batch.context_lens[r], start = end - (batch.query_starts[r + 1] - batch.query_starts[r]);
    for (int number = start / mixer.rate; number < end / mixer.rate; ++number) made.emplace_back(r, number);
  }
  const int work = 8 * mixer.series() * mixer.rate * mixer.head_dim();
  for_rows(pool_, static_cast<int>(made.size()), work, [&](int i) {
    const auto [row, number] = made[static_cast<size_t>(i)];
    make_entry(layer, mixer.compressed, batch, row, number);
    if (mixer.index) make_entry(layer, mixer.index->keys, batch, row, number);
  });
}

// Computes an entry: the mean of its tokens' values, weighted by their gates, normed, and rotated by the angle of its first
// token. If entries overlap, a token's values are [those for the next entry | those for its own entry].
void Decoder::make_entry(const Layer& layer, const CompressedEntries& of, const BatchView& batch, int row, int number) const {
  const CompressedAttention& mixer = *layer.compressed;
  const int rate = mixer.rate, dim = of.entries.width, all = mixer.series() * dim, first = number * rate;
  const int size = of.entries.block_size * rate;  // tokens per block
  const int32_t *inputs = table_of(batch, of.inputs_group, row), *entries = table_of(batch, of.group, row);
  std::vector<const float*> values, gates, biases;
  const auto take = [&](int from, int at) {
    for (int place = 0; place < rate; ++place) {
      const int position = from + place;
      const size_t slot = static_cast<size_t>(inputs[position / size]) * static_cast<size_t>(size) + static_cast<size_t>(position % size);
      const float* token = of.inputs + slot * 2 * static_cast<size_t>(all);
      values.push_back(token + at);
      gates.push_back(token + all + at);
      biases.push_back(of.bias.data() + static_cast<size_t>(place) * all + at);
    }
  };
  if (mixer.overlaps && number > 0) take(first - rate, 0);
  take(first, all - dim);
  Vector entry(static_cast<size_t>(dim));
  kernels_->mix_by_gates(values.data(), gates.data(), biases.data(), static_cast<int>(values.size()), dim, entry.data());
  kernels_->rms_norm(entry.data(), of.norm.data(), mixer.eps, dim, entry.data());
  turn(layer, first, 1.0f, entry.data(), dim);
  const int per_block = of.entries.block_size;
  kernels_->write_entry(of.entries, int64_t{entries[number / per_block]} * per_block + number % per_block, entry.data());
}

void Decoder::compressed_outputs(const Layer& layer, const BatchView& batch) {
  const CompressedAttention& mixer = *layer.compressed;
  const int tokens = batch.tokens, dim = mixer.head_dim(), groups = static_cast<int>(mixer.out.size());
  const int per_group = mixer.heads / groups, columns = per_group * dim;
  compressed_queries(layer, batch);
  if (mixer.index) choose_entries(mixer.index->view(mixer.rate), layer, batch);
  attend_window(layer, batch);
  const size_t wide = padded16(dim);
  size_t width = 0;
  for (const Linear& out : mixer.out) width += static_cast<size_t>(out.rows());
  grow(latent_values_, static_cast<size_t>(tokens) * width);
  group_rows_.resize(std::max(group_rows_.size(), mixer.out.size()));
  std::vector<Gemm> gemms;
  size_t at = 0;
  for (int g = 0; g < groups; ++g) {
    const Linear& out = mixer.out[static_cast<size_t>(g)];
    Activations& rows = group_rows_[static_cast<size_t>(g)];
    fill_rows(tokens, columns, 2 * columns, rows, form_for({&out}, outlier_threshold(layer)), [&](int t, float* to) {
      const float* from = mixtures_.data() + (static_cast<size_t>(t) * mixer.heads + static_cast<size_t>(g) * per_group) * wide;
      for (int h = 0; h < per_group; ++h) {
        std::copy_n(from + static_cast<size_t>(h) * wide, dim, to + static_cast<size_t>(h) * dim);
        turn(layer, batch.positions[t], -1.0f, to + static_cast<size_t>(h) * dim, dim);
      }
    });
    gemms.push_back({&out, nullptr, rows.view(), Gemm::Mode::Store, latent_values_.data() + at, width});
    at += static_cast<size_t>(out.rows());
  }
  run(gemms.data(), groups);
  fill_rows(tokens, static_cast<int>(width), static_cast<int>(width), heads_, form_for({&layer.o}, outlier_threshold(layer)),
            [&](int t, float* to) { std::copy_n(latent_values_.data() + static_cast<size_t>(t) * width, width, to); });
}

// Computes queries [T][heads][padded dim] from latents, which the indexer reads too.
void Decoder::compressed_queries(const Layer& layer, const BatchView& batch) {
  const CompressedAttention& mixer = *layer.compressed;
  const int tokens = batch.tokens, dim = mixer.head_dim(), q_rank = mixer.in[0].rows();
  const size_t stride = projected_width(layer), width = static_cast<size_t>(mixer.heads) * dim, wide = padded16(dim);
  const float threshold = outlier_threshold(layer);
  const Form form = mixer.index ? form_for({&mixer.q_up, &mixer.index->q}, threshold) : form_for({&mixer.q_up}, threshold);
  fill_rows(tokens, q_rank, 2 * q_rank, query_latents_, form, [&](int t, float* out) {
    kernels_->rms_norm(projected_.data() + static_cast<size_t>(t) * stride, mixer.q_norm.data(), mixer.eps, q_rank, out);
  });
  grow(queries_, static_cast<size_t>(tokens) * width);
  const Gemm up{&mixer.q_up, nullptr, query_latents_.view(), Gemm::Mode::Store, queries_.data(), width};
  run(&up, 1);
  grow(absorbed_, static_cast<size_t>(tokens) * mixer.heads * wide);
  for_rows(pool_, tokens, 4 * static_cast<int>(width), [&](int t) {
    for (int h = 0; h < mixer.heads; ++h) {
      float* to = absorbed_.data() + (static_cast<size_t>(t) * mixer.heads + h) * wide;
      const float* from = queries_.data() + static_cast<size_t>(t) * width + static_cast<size_t>(h) * dim;
      kernels_->rms_norm(from, ones_.data(), mixer.eps, dim, to);
      turn(layer, batch.positions[t], 1.0f, to, dim);
      std::fill(to + dim, to + wide, 0.0f);
    }
  });
}

// Attends with each token's heads to the keys of its window, then to the entries before it: [T][heads][padded dim].
void Decoder::attend_window(const Layer& layer, const BatchView& batch) {
  const CompressedAttention& mixer = *layer.compressed;
  const int dim = mixer.head_dim(), tiles = (mixer.heads + kHeadTile - 1) / kHeadTile;
  const size_t wide = padded16(dim);
  grow(mixtures_, static_cast<size_t>(batch.tokens) * mixer.heads * wide);
  choosing_.resize(row_scratch_.size());
  pool_.run(batch.tokens * tiles, [&](int piece, int thread) {
    const int t = piece / tiles, first = piece % tiles * kHeadTile, count = std::min(kHeadTile, mixer.heads - first);
    const int32_t* next = std::upper_bound(batch.query_starts, batch.query_starts + batch.rows + 1, t);
    const int row = static_cast<int>(next - batch.query_starts - 1), context = batch.context_lens[row] - (*next - t) + 1;
    std::vector<int32_t>& window = choosing_[static_cast<size_t>(thread)];
    window.resize(static_cast<size_t>(std::min(context, mixer.window)));
    std::iota(window.begin(), window.end(), context - static_cast<int>(window.size()));
    Vector& scratch = row_scratch_[static_cast<size_t>(thread)];
    const size_t room = kernels_->entry_scratch_floats(dim);
    grow(scratch, room + kHeadTile * wide);
    const size_t at = (static_cast<size_t>(t) * mixer.heads + first) * wide;
    const float* queries = absorbed_.data() + at;
    float *sums = mixtures_.data() + at, *more_sums = scratch.data() + room;
    Partial partial[kHeadTile], more[kHeadTile];
    kernels_->attend_entries(mixer.keys, table_of(batch, layer.group, row), window.data(), queries, count,
                             static_cast<int>(window.size()), mixer.scale, sums, partial, scratch.data());
    if (mixer.rate != 0 && context >= mixer.rate) {
      const int32_t* chosen = nullptr;
      int seen = context / mixer.rate;
      if (mixer.index && num_chosen_[static_cast<size_t>(t)] != kSeesAll) {
        chosen = chosen_.data() + static_cast<size_t>(t) * chosen_stride_;
        seen = num_chosen_[static_cast<size_t>(t)];
      }
      kernels_->attend_entries(mixer.compressed.entries, table_of(batch, mixer.compressed.group, row), chosen, queries, count,
                               seen, mixer.scale, more_sums, more, scratch.data());
      for (int i = 0; i < count; ++i) kernels_->join(sums + i * wide, partial[i], more_sums + i * wide, more[i], dim);
    }
    for (int i = 0; i < count; ++i)
      kernels_->finish(sums + i * wide, partial[i], mixer.sinks.data() + first + i, static_cast<int>(wide), sums + i * wide);
  });
}

}  // namespace tokenmill
