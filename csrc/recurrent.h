// A recurrent mixer: gated DeltaNet or Mamba-2 (tokenmill/arch/recurrent.py has the sums). What a head keeps is a state at
// multiples of 64 tokens, and of the tokens behind it a cell each: key, update, sum of decays.
#pragma once
#include <cstdint>
#include <vector>

#include "matrix.h"

namespace tokenmill {

inline constexpr int kStateChunk = 64;  // tokens between two states

struct RecurrentShape {
  bool is_delta = false;
  bool has_channel_decays = false;  // each channel of a key decays at a rate of its own; with the delta rule only
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, kernel = 0;

  bool is_tiled = false;  // value heads take turns over the key heads, instead of following one another under one of them

  int key_head_of(int value_head) const {
    return is_tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
  // The first of the value heads of a key head, which keeps its keys.
  bool keeps_keys(int value_head) const {
    return is_tiled ? value_head < key_heads : value_head % (value_heads / key_heads) == 0;
  }
  int keys() const { return key_heads * key_dim; }
  int values() const { return value_heads * value_dim; }
  int channels() const { return 2 * keys() + values(); }
  int decays() const { return has_channel_decays ? value_heads * key_dim : value_heads; }
};

// The cells of a chunk that a head sees, oldest first; those of this step lie in scratch memory.
struct ChunkCells {
  const float* keys[kStateChunk];
  const float* updates[kStateChunk];
  float decays[kStateChunk];  // G: sums since the chunk began
  const float* channel_decays[kStateChunk];  // instead, where channels have their own: [key_dim] each
};

// One token of one head.
struct RecurrentToken {
  const float* q;  // [key_dim], normed and scaled where the rule asks for it; so is its own key among the cells
  const float* v;  // [value_dim]
  float strength;  // beta, or dt
  float* room;     // [2 * key_dim], where channels have decays of their own
};

}  // namespace tokenmill
