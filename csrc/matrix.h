// The memory layout of weight matrices. Sixteen outputs (a panel) are interleaved so that one vector register holds one
// value of each; inputs are grouped in blocks of 32.
//
//   matrix  = panel 0 | panel 1 | ...                        outputs beyond `rows` are zero
//   panel   = payload of all blocks | scales of all blocks   (each part starts at a multiple of 64 bytes)
//   payload of a block, group j = inputs 4j..4j+3, byte 4*o+k of a group belongs to output o:
//     8 bits  8 groups of 64 bytes
//     4 bits  4 times 64 bytes: group j in the low nibbles, group j+4 in the high ones
//     5 bits  the same, then 8 words of 64 bits: bit i of word j is the fifth bit of byte i of group j
//     6 bits  as 4 bits, then 2 times 64 bytes: bits 2s, 2s+1 of half h are the top bits of group 4h+s
//     2 bits  2 times 64 bytes: bits 2s, 2s+1 of half h are group 4h+s
//     3 bits  the same, then 8 words of 64 bits as with 5 bits
//   scales
//     Q8_0 Q4_0 Q5_0   per block        d[16] half
//     IQ4_NL           per block        d[16] half                       w = d table[q]     (kTables, less its zero)
//     MXFP4            per block        d[16] bfloat, a power of two     w = d table[q]
//     Q4_1 Q5_1        per block        d[16], m[16] half                                   w = d q + m
//     Q4_K Q5_K        per 8 blocks     d[16], dmin[16] half, then sc[8][16], mn[8][16] u8  w = d sc q - dmin mn
//     Q6_K Q3_K        per 8 blocks     d[16] half, then sc[16][16] i8, one per 16 inputs   w = d sc (q - 32, or 4)
//     Q2_K             per 8 blocks     d[16], dmin[16] half, then sm[16][16]: sc, mn in the low and high nibbles
//     IQ4_XS           per 8 blocks     d[16] half, then sc[8][16] i8                       w = d sc table[q]
//     G4 G8            per group        d[16], z[16] float                                  w = d (q - z)
//     NF4 FP4          per group        d[16] float                                         w = d (table[q] + finer[q] / 256)
//     NV4              g[16] float first; per block sc[2][16] e4m3, one per 16 inputs       w = g sc table[q]
//   A group is one block or, if the kind's name says so ("G4:4"), several blocks that share a scale.
//   Columns may be reordered ("G4:4@", act order): the panels are followed by the index of the input of each column, int32.
//   unquantised matrices: [panel][input][16 outputs] in float32, half or bfloat16; F8: e4m3, followed by d[16] float per group
//
// The file's values are kept without requantisation, except for the tables of NF4 and FP4, whose floats have 16 bits here:
// two tables of 8 bits, by which a chunk of blocks is multiplied one after the other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tokenmill {

enum class Kind : uint8_t {
  Q8_0, Q4_0, Q5_0, Q4_1, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, IQ4_NL, IQ4_XS, Q2_K, Q3_K, G4, G8, T4, NV4, F32, F16, BF16, F8
};
// T4: NF4 and FP4, which differ in their tables only.

inline constexpr int kPanel = 16;
inline constexpr int kBlock = 32;
inline constexpr int kSuper = 8;  // blocks in a super-block of the K formats

constexpr bool is_quantised(Kind kind) { return kind < Kind::F32; }

constexpr int payload_bits(Kind kind) {
  switch (kind) {
    case Kind::Q8_0: case Kind::G8: return 8;
    case Kind::Q4_0: case Kind::Q4_1: case Kind::Q4_K: case Kind::MXFP4: case Kind::IQ4_NL: case Kind::IQ4_XS:
    case Kind::G4: case Kind::T4: case Kind::NV4: return 4;
    case Kind::Q2_K: return 2;
    case Kind::Q3_K: return 3;
    case Kind::Q5_0: case Kind::Q5_1: case Kind::Q5_K: return 5;
    case Kind::Q6_K: return 6;
    default: return 0;
  }
}
// log2 of the offset that is subtracted from stored unsigned values; -1: none
constexpr int zero_shift(Kind kind) {
  switch (kind) {
    case Kind::Q8_0: case Kind::IQ4_NL: case Kind::IQ4_XS: case Kind::G8: case Kind::T4: return 7;
    case Kind::Q3_K: return 2;
    case Kind::Q4_0: return 3;
    case Kind::Q5_0: case Kind::MXFP4: case Kind::NV4: return 4;
    case Kind::Q6_K: return 5;
    default: return -1;
  }
}
// Tables of 4-bit formats, with the offset added. Values of e2m1 (MXFP4, NV4) are doubled, and those of NF4 and FP4 are
// multiplied by the table's factor, for which the scales compensate; the rounding error of the latter is in a second table,
// times 256.
constexpr bool has_table(Kind kind) {
  return kind == Kind::MXFP4 || kind == Kind::IQ4_NL || kind == Kind::IQ4_XS || kind == Kind::T4 || kind == Kind::NV4;
}
struct Table {
  uint8_t numbers[16];
  float times;
  uint8_t finer[16] = {};
};
constexpr int num_tables(Kind kind) { return kind == Kind::T4 ? 2 : 1; }
constexpr Table table_of(const double (&values)[16]) {
  Table table{{}, 127.0f};
  for (int i = 0; i < 16; ++i) {
    const double times = values[i] * 127.0 * 256.0;
    const int rounded = static_cast<int>(times < 0 ? times - 0.5 : times + 0.5), number = (rounded + 128 + (1 << 16)) / 256 - 256;
    table.numbers[i] = static_cast<uint8_t>(number + 128);
    table.finer[i] = static_cast<uint8_t>(rounded - 256 * number + 128);
  }
  return table;
}
inline constexpr Table kE2m1{{16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4}, 2.0f};
inline constexpr Table kIq4{{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}, 1.0f};
inline constexpr Table kNf4 = table_of(
    {-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0});
inline constexpr Table kFp4 = table_of({0.0, 0.0625 / 12, 8.0 / 12, 1.0, 4.0 / 12, 6.0 / 12, 2.0 / 12, 3.0 / 12, 0.0,
                                        -0.0625 / 12, -8.0 / 12, -1.0, -4.0 / 12, -6.0 / 12, -2.0 / 12, -3.0 / 12});
// Whether unpacked values need all 8 bits.
constexpr bool is_wide(Kind kind) { return zero_shift(kind) == 7; }
constexpr bool has_min(Kind kind) {
  return kind == Kind::Q4_1 || kind == Kind::Q5_1 || kind == Kind::Q4_K || kind == Kind::Q5_K || kind == Kind::Q2_K ||
         kind == Kind::G4 || kind == Kind::G8;
}
constexpr bool has_halves(Kind kind) {  // a scale per 16 inputs
  return kind == Kind::Q6_K || kind == Kind::Q2_K || kind == Kind::Q3_K || kind == Kind::NV4;
}
constexpr bool has_supers(Kind kind) {
  return kind == Kind::Q4_K || kind == Kind::Q5_K || kind == Kind::Q6_K || kind == Kind::Q2_K || kind == Kind::Q3_K ||
         kind == Kind::IQ4_XS;
}
// Kinds in which several blocks may share a scale.
constexpr bool has_groups(Kind kind) {
  return kind == Kind::G4 || kind == Kind::G8 || kind == Kind::T4 || kind == Kind::F8;
}

constexpr size_t payload_bytes(Kind kind) { return static_cast<size_t>(payload_bits(kind)) * kPanel * kBlock / 8; }
// per block, or per super-block if there are any
constexpr size_t scale_bytes(Kind kind) {
  if (kind == Kind::Q6_K || kind == Kind::Q3_K) return 32 + 256;
  if (kind == Kind::IQ4_XS) return 32 + 128;
  if (has_supers(kind)) return 64 + 256;
  if (kind == Kind::T4 || kind == Kind::F8) return 64;
  if (kind == Kind::G4 || kind == Kind::G8) return 128;
  return has_min(kind) ? 64 : 32;
}

// A kind as given by its name: "Q4_0", "NF4", "G4:4", "G4@".
struct Packing {
  Kind kind = Kind::F32;
  int group = 1;  // blocks that share a scale
  const Table* table = nullptr;  // if the kind has one
  bool is_ordered = false;  // the columns are reordered
};

struct Matrix {
  Kind kind = Kind::F32;
  int group = 1;  // see Packing
  const Table* table = nullptr;
  bool is_ordered = false;
  int rows = 0, cols = 0;
  int panels = 0, blocks = 0;
  size_t panel_bytes = 0, scales_at = 0;
  std::shared_ptr<uint8_t[]> owner;  // null if the memory has another owner
  uint8_t* data = nullptr;

  const uint8_t* panel(int p) const { return data + static_cast<size_t>(p) * panel_bytes; }
  size_t order_at() const { return static_cast<size_t>(panels) * panel_bytes; }
  const int32_t* order() const { return is_ordered ? reinterpret_cast<const int32_t*>(data + order_at()) : nullptr; }
  size_t num_bytes() const { return order_at() + (is_ordered ? (static_cast<size_t>(cols) * 4 + 63) / 64 * 64 : 0); }
};

// The sizes of a packed matrix, without memory. Throws std::invalid_argument for shapes that the kind does not support.
Matrix matrix_layout(const Packing& packing, int rows, int cols);
// `source`: the file's rows of blocks (or unquantised values of the kind), `row_bytes` apart.
Matrix pack_matrix(const Packing& packing, int rows, int cols, const uint8_t* source, size_t row_bytes);
Packing packing_from_name(const std::string& name);
size_t source_row_bytes(Kind kind, int cols);

}  // namespace tokenmill
