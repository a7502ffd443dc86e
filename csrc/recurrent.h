// A recurrent mixer: gated DeltaNet, Mamba-2 or Mamba-1 (formulas in tokenmill/arch/recurrent.py). A head caches a state at
// multiples of 64 tokens, and for each later token a cell: key, update, cumulative decay (of Mamba-1: its steps).
#pragma once
#include <cstdint>
#include <vector>

#include "matrix.h"

namespace tokenmill {

inline constexpr int kStateChunk = 64;  // tokens between two states

struct RecurrentShape {
  bool is_delta = false;
  bool has_channel_decays = false;  // each channel of a key has its own decay rate; with the delta rule only
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, kernel = 0;

  bool is_tiled = false;  // value head h uses key head h % key_heads, instead of consecutive value heads sharing one
  bool is_scan = false;   // Mamba-1: one head; keys, queries and decays are projected from the convolved values

  int key_head_of(int value_head) const {
    return is_tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
  // Whether this is the first of a key head's value heads, which writes its keys to the cache.
  bool keeps_keys(int value_head) const {
    return is_tiled ? value_head < key_heads : value_head % (value_heads / key_heads) == 0;
  }
  int keys() const { return key_heads * key_dim; }
  int values() const { return value_heads * value_dim; }
  int channels() const { return is_scan ? values() : 2 * keys() + values(); }
  int decays() const { return is_scan ? values() : has_channel_decays ? value_heads * key_dim : value_heads; }
};

// Some channels of a recurrence with a decay rate per channel and state (Mamba-1).
struct ScanTile {
  const float* rates;  // [size][stride], those of the tile's channels first
  size_t stride;
  int size, channels;  // states of a channel; channels of the tile
};

// The cells of a chunk that a head reads, oldest first; those of this step are in scratch memory.
struct ChunkCells {
  const float* keys[kStateChunk];
  const float* updates[kStateChunk];
  float decays[kStateChunk];  // G: sums since the chunk began
  const float* channel_decays[kStateChunk];  // with decays per channel, instead: [key_dim] each
};

// One token of one head.
struct RecurrentToken {
  const float* q;  // [key_dim], normed and scaled if the rule requires it, like its own key among the cells
  const float* v;  // [value_dim]
  float strength;  // beta, or dt
  float* room;     // scratch [2 * key_dim], with decays per channel
};

}  // namespace tokenmill
