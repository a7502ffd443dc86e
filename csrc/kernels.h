// The kernels as a table of functions, one table per instruction set; `best_kernels` selects by the processor's features.
// All are pure functions of their arguments, and a row's result depends on that row only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "matrix.h"
#include "recurrent.h"

namespace tokenmill {

// Quantised activations of T rows: integers with a scale per block of 32 inputs, x = scale * q. Rows are grouped in tiles of
// `tile` rows (the last one may have fewer), and a tile has one record per block of inputs, so that a kernel advances one
// pointer and two threads never write to one cache line. A record of M rows, each field [M] unless stated otherwise:
//
//   float scale | float scale * sum(q) | corrections of the weights' offset: int -128 * sum(q) | int -8 * sum(q) |
//   int [2][M] -32 * sum(16 of q) | int8 q [M][32]
//
// The remainder beyond 8 bits, in units of scale / 256, may be in a second record of the same form, `remainder_at` bytes after
// the first. A product adds it only for the blocks in the tile's list, where rows that don't need it have a scale of 0; for
// other blocks only `q` of that record is filled in.
struct QuantRows {
  int rows = 0, tile = 1, blocks = 0;
  uint8_t* records = nullptr;
  size_t remainder_at = 0;         // 0: there are no remainders
  uint16_t* lists = nullptr;  // [tile][1 + blocks]: number of listed blocks, then their indices, ascending

  int rows_in(int t) const { return rows - t * tile < tile ? rows - t * tile : tile; }
  int tiles() const { return (rows + tile - 1) / tile; }
  static constexpr size_t numbers_at(int count) { return 24 * static_cast<size_t>(count); }
  static constexpr size_t record_bytes(int count) {
    return (numbers_at(count) + static_cast<size_t>(count) * kBlock + 63) / 64 * 64;
  }
  uint8_t* record(int t, int block) const {
    const size_t before = static_cast<size_t>(t) * blocks * record_bytes(tile);
    return records + before + static_cast<size_t>(block) * record_bytes(rows_in(t));
  }
  uint16_t* list(int t) const { return lists + static_cast<size_t>(t) * (blocks + 1); }
  static int8_t* numbers(uint8_t* record, int count, int m) {
    return reinterpret_cast<int8_t*>(record) + numbers_at(count) + m * kBlock;
  }
  // Fills in all fields of row m except q, given the sums of both halves of q.
  static void put_sums(uint8_t* record, int count, int m, float scale, int32_t first, int32_t second) {
    auto* floats = reinterpret_cast<float*>(record) + m;
    floats[0] = scale;
    floats[count] = scale * static_cast<float>(first + second);
    auto* starts = reinterpret_cast<int32_t*>(record) + 2 * count + m;
    starts[0] = -128 * (first + second);
    starts[count] = -8 * (first + second);
    starts[2 * count] = -32 * first;
    starts[3 * count] = -32 * second;
  }
};

// Activations in both forms; `quant` is filled only if a quantised matrix reads it.
struct Rows {
  const float* values = nullptr;  // [rows][stride]
  size_t stride = 0;
  QuantRows quant;
};

enum class Store : uint8_t { F32, F16, BF16, I8 };
// xIELU: positive x² + linear x above 0, negative (e^min(x, eps) - 1 - x) + linear x below; eps is at most 0.
struct XieluCurve {
  float positive, negative, linear, eps;
};

enum class Activation : uint8_t {
  Silu, Gelu, GeluTanh, Relu, Relu2, SwigluOai, SiluTo10, ClampedSilu4, ClampedSilu5, ClampedSilu7, ClampedSilu16
};

inline constexpr int kMaxHeadDim = 512;

struct PagedCache {
  void* keys = nullptr;    // [block][kv head][16-token group][head_dim][16 tokens]; for I8 see kernels/attention_int8.h
  void* values = nullptr;  // [block][kv head][token][value_dim]
  float* key_scales = nullptr;    // [block][kv head][token], for I8 only: a key is its integers times its scale
  float* value_scales = nullptr;
  Store store = Store::F32;
  int kv_heads = 0, head_dim = 0, block_size = 0, value_dim = 0;  // `head_dim`: of keys
  size_t key_stride = 0, value_stride = 0, scale_stride = 0;      // numbers between blocks

  int widest() const { return head_dim > value_dim ? head_dim : value_dim; }
};

// The cache of latent attention: one entry per token for all heads, its latent followed by a rotated key.
struct EntryCache {
  void* entries = nullptr;  // [block][token][width]
  Store store = Store::F32;  // any but I8
  int width = 0, rank = 0, block_size = 0;
};

struct AttentionTask {
  PagedCache cache;
  int heads = 0;
  float scale = 1.0f;
  int window = 0;       // 0: none
  bool is_chunked = false;  // chunked attention: the window starts at multiples of its size
  float softcap = 0.0f;  // 0: none
  const float* sinks = nullptr;
  const float* slopes = nullptr;  // ALiBi, per head: a score grows by slope * (key's position - query's)
};

// The online-softmax state of one query after a part of its context, besides the weighted sums: largest score, sum of weights.
struct Partial {
  float largest, total;
};

// A part of a product: `panels` (1 or 2) panels from `panel`, rows of tiles [tile, tile_end). The same thread probably
// continues with panel `next`, which may be prefetched.
struct Span {
  int panel, panels, tile, tile_end, next;
};
// The output of a span: row r begins at out + r * stride; with `onto` the sums are added to it.
struct Sums {
  float* out;
  size_t stride;
  bool onto;
};

// A running argmax: the highest number so far and its index, of equal ones the first; records whether there was a NaN.
struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int32_t place = 0;
  bool has_nan = false;

  // Merges another argmax, whose indices may be lower or higher.
  void take(const Best& other) {
    const bool any_nan = has_nan || other.has_nan;
    if (other.value > value || (other.value == value && other.place < place)) *this = other;
    has_nan = any_nan;
  }
};

// How a token is sampled: logits are divided by the temperature (0: unchanged), reduced to the `top_k` highest (0: all), the
// probabilities then to those that top-p (1: all) and min-p (0: all) keep; `uniform` in [0, 1) selects the token.
struct DrawParams {
  float temperature = 0.0f;
  int64_t top_k = 0;
  double top_p = 1.0, min_p = 0.0, uniform = 0.0;
  bool is_greedy = false;  // take the highest logit; the other parameters are ignored
};
struct DrawRoom {  // scratch memory of one thread, reused between calls
  std::vector<float> logits;
  std::vector<int32_t> tokens;
};

struct Kernels {
  const char* name;
  int small_rows;  // up to this many rows are one tile
  int tile_rows;   // more rows are grouped in tiles of this size
  int many_rows;   // from this many rows on, in tiles of `wide_tile_rows`
  int wide_tile_rows;
  int tile_for(int rows) const {
    if (rows <= small_rows) return rows > 1 ? rows : 1;
    return rows < many_rows ? tile_rows : wide_tile_rows;
  }

  size_t (*linear_scratch_bytes)(const Matrix&);
  void (*linear)(const Matrix&, const Rows&, const Span&, const Sums&, uint8_t* scratch);
  // Quantises `rows` rows of `blocks` blocks, `stride` apart, to rows from `row` and blocks from `block` of `to`.
  void (*quantise)(const float* x, size_t stride, int rows, int blocks, const QuantRows& to, int row, int block);
  // After all rows of tile t are quantised: lists the blocks whose remainders are used, that is in which a row's largest
  // magnitude exceeds `outlier_threshold` times the quadratic mean of all blocks' largest.
  void (*mark_outliers)(const QuantRows& rows, int t, float outlier_threshold);
  // act(gate) * up for 32 columns
  void (*gate)(const float* gate, const float* up, Activation, float* out);
  // The same for `rows` rows, quantised as one block of rows [row, row + rows) of `to`; the first row begins a tile.
  void (*gate_rows)(const float* gates, const float* ups, int rows, Activation, const QuantRows& to, int row, int block);
  void (*xielu)(const float* x, const XieluCurve&, int size, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* out);
  // rms_norm of x minus its mean, plus the bias, which may be null
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int size, float* out);
  void (*add)(float* x, const float* y, int size);
  void (*multiply)(const float* x, const float* y, int size, float* out);
  void (*scale)(float* x, float factor, int size);
  void (*sigmoid)(const float* x, int size, float* out);
  // gate * (bias + sum of taps[k] * weight[k]), vectors of `size`; a null tap is zero
  void (*short_conv)(const float* const* taps, const float* weight, const float* bias, const float* gate, int kernel,
                     int size, float* out);
  void (*silu)(const float* x, int size, float* out);
  // See kernels/recurrent.h; head dimensions are multiples of 16.
  void (*unit_vector)(const float* x, float scale, int size, float* out);
  void (*recur_token)(const RecurrentShape&, const ChunkCells&, int at, const float* state, const RecurrentToken&,
                      float* update, float* out);
  void (*next_state)(const RecurrentShape&, const ChunkCells&, const float* state, float* next);
  // See kernels/selective_scan.h.
  void (*scan_token)(const ScanTile&, const float* step, const float* key, const float* update, const float* query,
                     float* state, float* out);
  void (*embed)(const Matrix&, int row, float scale, float* out);
  void (*rotate)(float* head, const float* cos, const float* sin, int half);
  void (*write_kv)(const PagedCache&, int64_t slot, int kv_head, const float* key, const float* value);
  size_t (*attention_scratch_bytes)(int widest);  // of keys and values
  int query_tile;  // most queries per call of `attend`
  // Attends with `count` queries of one row and KV head: query i, q[i] in float32, sees keys [first[i], limit[i]). Only the
  // part [from, to) of the context is read; both are multiples of 256 unless they are the ends of the context. Calls with
  // the same scratch and the same `keys_id` other than 0 read the same, unchanged keys: a call may reuse the keys that an
  // earlier one converted. `slopes` [count], of the queries' heads, or null (ALiBi).
  void (*attend)(const AttentionTask&, int kv_head, const int32_t* table, const float* const* q, const int* first,
                 const int* limit, const float* slopes, int count, int from, int to, uint64_t keys_id, float* sums, Partial* partial,
                 uint8_t* scratch);
  void (*finish)(const float* sums, const Partial&, const float* sink, int value_dim, float* out);
  // Merges `other`, which covers the context that follows, into `sums`.
  void (*join)(float* sums, Partial&, const float* other_sums, const Partial& other, int value_dim);
  size_t (*entry_scratch_floats)(int rank);
  // Attends with `count` queries [count][width, padded to 16] of one token to the first `limit` entries of its context, or to
  // the `limit` entries that `chosen` names, if it is not null: weighted sums [count][rank, padded] of the entries' first
  // `rank` values.
  void (*attend_entries)(const EntryCache&, const int32_t* table, const int32_t* chosen, const float* q, int count,
                         int limit, float scale, float* sums, Partial* partial, float* scratch);
  // An indexer's scores, sum over heads of weights[h] * max(0, q_h . entry), of the entries [from, to); `from` is a multiple of
  // 256; q [heads][width, padded to 16], scratch of `index_scratch_floats`.
  void (*index_scores)(const EntryCache&, const int32_t* table, const float* q, const float* weights, int heads, int from,
                       int to, float* out, float* scratch);
  size_t index_scratch_floats;
  void (*write_entry)(const EntryCache&, int64_t slot, const float* values);
  // out [size]: the elementwise sum over k of values[k], weighted by the softmax over k of gates[k] + biases[k].
  void (*mix_by_gates)(const float* const* values, const float* const* gates, const float* const* biases, int count,
                       int size, float* out);
  void (*softcap)(float* x, float cap, int size);
  // Updates a running argmax with `size` numbers from index `place`; earlier calls had lower indices.
  void (*take_best)(const float* x, int size, int place, Best&);
  void (*softmax_row)(const float* x, int size, float* out);  // zeros if the highest number is not finite
  int (*draw_token)(const float* logits, int size, const DrawParams&, DrawRoom&);  // -1 if it is not
};

inline constexpr int kTilesPerCall = 24;  // most row tiles in one call of `linear`
inline constexpr int kSegment = 256;  // keys per step of the online softmax; boundaries are absolute positions

const Kernels& best_kernels();
const Kernels* kernels_named(const std::string& name);  // null if this processor can't run them
std::vector<std::string> runnable_kernels();            // best first

}  // namespace tokenmill
