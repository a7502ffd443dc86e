// Repacks a file's blocks into panels (layout in matrix.h).
#include "packing.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "pages.h"

namespace tokenmill {
namespace {

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

uint32_t four_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}
void merge_four(uint8_t* p, uint32_t bits) {
  const uint32_t word = four_at(p) | bits;
  std::memcpy(p, &word, 4);
}

// The lowest bits of four bytes, in the nibble of this output.
uint8_t bit_of_each(uint32_t four, int output) {
  const uint32_t nibble = (four | four >> 7 | four >> 14 | four >> 21) & 15u;
  return static_cast<uint8_t>(nibble << (output % 2 * 4));
}

// Writes the 32 stored values of one output of a block to the payload, four (a group) at a time.
void put_payload(Kind kind, uint8_t* payload, int output, const uint8_t* numbers) {
  const int bits = payload_bits(kind);
  for (int group = 0; group < 8; ++group) {
    const uint32_t four = four_at(numbers + 4 * group);
    if (bits == 8) {
      std::memcpy(payload + 64 * group + 4 * output, &four, 4);
      continue;
    }
    if (bits < 4) {
      merge_four(payload + 64 * (group / 4) + 4 * output, (four & 0x03030303u) << (2 * (group % 4)));
      const uint32_t third = (four >> 2) & 0x01010101u;
      if (bits == 3) payload[128 + 8 * group + output / 2] |= bit_of_each(third, output);
      continue;
    }
    merge_four(payload + 64 * (group % 4) + 4 * output, (four & 0x0F0F0F0Fu) << (group < 4 ? 0 : 4));
    const uint32_t top = (four >> 4) & 0x0F0F0F0Fu;
    if (bits == 6) merge_four(payload + 256 + 64 * (group / 4) + 4 * output, top << (2 * (group % 4)));
    if (bits == 5) payload[256 + 8 * group + output / 2] |= bit_of_each(top, output);
  }
}

// 2^(exponent - 128) as bfloat: half the scale of an MXFP4 block, since the table's values are doubled.
uint16_t half_power(uint8_t exponent) {
  return static_cast<uint16_t>(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
}

void put_half(uint8_t* at, int output, const uint8_t* half) { std::memcpy(at + 2 * output, half, 2); }
float float_at(const uint8_t* p) {
  float value;
  std::memcpy(&value, p, 4);
  return value;
}
void put_float(uint8_t* at, int output, float value) { std::memcpy(at + 4 * output, &value, 4); }

// ── simple blocks of 32: header, ([fifth bits u32]) payload ──
//   Q8_0 Q4_0 Q5_0 IQ4_NL  d half       MXFP4    exponent u8        G4 G8  d float, z float (G8: unsigned numbers)
//   Q4_1 Q5_1              d, m half    NF4 FP4  d float            NV4    g float, 2 scales of 16 inputs e4m3
size_t payload_at(Kind kind) {
  switch (kind) {
    case Kind::MXFP4: return 1;
    case Kind::T4: case Kind::F8: return 4;
    case Kind::NV4: return 6;
    case Kind::G4: case Kind::G8: return 8;
    default: return has_min(kind) ? 4 : 2;
  }
}

void unpack_simple(Kind kind, const uint8_t* block, uint8_t* numbers) {
  const uint8_t* p = block + payload_at(kind);
  if (payload_bits(kind) == 8) {
    const uint8_t flip = kind == Kind::Q8_0 ? 0x80 : 0;
    for (int k = 0; k < kBlock; ++k) numbers[k] = static_cast<uint8_t>(p[k] ^ flip);
    return;
  }
  uint32_t fifth = 0;
  if (payload_bits(kind) == 5) {
    std::memcpy(&fifth, p, 4);
    p += 4;
  }
  for (int k = 0; k < 16; ++k) {
    numbers[k] = static_cast<uint8_t>((p[k] & 15) | (((fifth >> k) & 1) << 4));
    numbers[k + 16] = static_cast<uint8_t>((p[k] >> 4) | (((fifth >> (k + 16)) & 1) << 4));
  }
}

void put_scales(const Matrix& m, uint8_t* scales, int b, int output, const uint8_t* block) {
  uint8_t* of_block = scales + b / m.group * scale_bytes(m.kind);
  switch (m.kind) {
    case Kind::MXFP4: {
      const uint16_t scale = half_power(block[0]);
      return put_half(of_block, output, reinterpret_cast<const uint8_t*>(&scale));
    }
    case Kind::G4: case Kind::G8:
      put_float(of_block, output, float_at(block));
      return put_float(of_block + 64, output, float_at(block + 4) - (m.kind == Kind::G8 ? 128.0f : 0.0f));
    case Kind::T4: return put_float(of_block, output, float_at(block) / m.table->times);
    case Kind::NV4:  // e4m3 bits are read as a half, which is 2^8 times too small
      if (b == 0) put_float(scales, output, float_at(block) * 256.0f / m.table->times);
      of_block += 64;
      of_block[output] = block[4];
      of_block[16 + output] = block[5];
      return;
    default:
      put_half(of_block, output, block);
      if (has_min(m.kind)) put_half(of_block + 32, output, block + 2);
  }
}

void pack_simple(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  const size_t block_bytes = source_row_bytes(m.kind, kBlock);
  uint8_t numbers[kBlock];
  for (int b = 0; b < m.blocks; ++b, row += block_bytes) {
    unpack_simple(m.kind, row, numbers);
    put_payload(m.kind, panel + b * payload_bytes(m.kind), output, numbers);
    put_scales(m, panel + m.scales_at, b, output, row);
  }
}

// ── F8: d float, 32 e4m3; e4m3 bits are read as a half, which is 2^8 times too small ──
void pack_eight_bit_floats(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  for (int b = 0; b < m.blocks; ++b, row += 4 + kBlock) {
    put_float(panel + m.scales_at + b / m.group * scale_bytes(m.kind), output, float_at(row) * 256.0f);
    for (int k = 0; k < kBlock; ++k) panel[static_cast<size_t>(b * kBlock + k) * kPanel + output] = row[4 + k];
  }
}

// ── Q4_K, Q5_K: d, dmin, 12 bytes of 6-bit scales and mins, (32 bytes of fifth bits,) 128 bytes of nibbles ──
void six_bit_pair(const uint8_t* packed, int j, uint8_t& scale, uint8_t& minimum) {
  if (j < 4) {
    scale = packed[j] & 63;
    minimum = packed[j + 4] & 63;
    return;
  }
  scale = static_cast<uint8_t>((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4));
  minimum = static_cast<uint8_t>((packed[j + 4] >> 4) | ((packed[j] >> 6) << 4));
}

void pack_super_min(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  const bool five = m.kind == Kind::Q5_K;
  const size_t super_bytes = source_row_bytes(m.kind, kBlock * kSuper);
  uint8_t numbers[kBlock];
  for (int s = 0; s < m.blocks / kSuper; ++s, row += super_bytes) {
    uint8_t* scales = panel + m.scales_at + s * scale_bytes(m.kind);
    put_half(scales, output, row);
    put_half(scales + 32, output, row + 2);
    const uint8_t* fifth = row + 16;
    const uint8_t* nibbles = row + (five ? 48 : 16);
    for (int j = 0; j < kSuper; ++j) {
      six_bit_pair(row + 4, j, scales[64 + 16 * j + output], scales[192 + 16 * j + output]);
      for (int k = 0; k < kBlock; ++k) {
        const uint8_t byte = nibbles[32 * (j / 2) + k];
        numbers[k] = j % 2 ? byte >> 4 : byte & 15;
        if (five) numbers[k] |= static_cast<uint8_t>(((fifth[k] >> j) & 1) << 4);
      }
      put_payload(m.kind, panel + (s * kSuper + j) * payload_bytes(m.kind), output, numbers);
    }
  }
}

// ── Q6_K: 128 bytes of nibbles, 64 bytes of top bits, 16 int8 scales, d ──
void pack_super_six(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  const size_t super_bytes = source_row_bytes(m.kind, kBlock * kSuper);
  uint8_t numbers[kBlock];
  for (int s = 0; s < m.blocks / kSuper; ++s, row += super_bytes) {
    uint8_t* scales = panel + m.scales_at + s * scale_bytes(m.kind);
    put_half(scales, output, row + 208);
    for (int j = 0; j < 16; ++j) scales[32 + 16 * j + output] = row[192 + j];
    for (int j = 0; j < kSuper; ++j) {
      const uint8_t* low = row + 64 * (j / 4) + 32 * (j % 2);
      const uint8_t* top = row + 128 + 32 * (j / 4);
      for (int k = 0; k < kBlock; ++k) {
        const int nibble = (j % 4) / 2 ? low[k] >> 4 : low[k] & 15;
        numbers[k] = static_cast<uint8_t>(nibble | (((top[k] >> (2 * (j % 4))) & 3) << 4));
      }
      put_payload(m.kind, panel + (s * kSuper + j) * payload_bytes(m.kind), output, numbers);
    }
  }
}

// ── Q2_K: 16 bytes of scales and mins, 64 bytes of pairs, d, dmin ──
void pack_super_two(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  uint8_t numbers[kBlock];
  for (int s = 0; s < m.blocks / kSuper; ++s, row += 84) {
    uint8_t* scales = panel + m.scales_at + s * scale_bytes(m.kind);
    put_half(scales, output, row + 80);
    put_half(scales + 32, output, row + 82);
    for (int j = 0; j < 16; ++j) scales[64 + 16 * j + output] = row[j];
    for (int j = 0; j < kSuper; ++j) {
      for (int k = 0; k < kBlock; ++k) numbers[k] = (row[16 + 32 * (j / 4) + k] >> (2 * (j % 4))) & 3;
      put_payload(m.kind, panel + (s * kSuper + j) * payload_bytes(m.kind), output, numbers);
    }
  }
}

// ── Q3_K: 32 bytes of third bits, 64 bytes of pairs, 12 bytes of 6-bit scales, d ──
void pack_super_three(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  uint8_t numbers[kBlock];
  for (int s = 0; s < m.blocks / kSuper; ++s, row += 110) {
    uint8_t* scales = panel + m.scales_at + s * scale_bytes(m.kind);
    put_half(scales, output, row + 108);
    for (int j = 0; j < 16; ++j) {
      const int low = j < 8 ? row[96 + j] & 15 : row[96 + j - 8] >> 4;
      const int high = (row[104 + j % 4] >> (2 * (j / 4))) & 3;
      scales[32 + 16 * j + output] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    for (int j = 0; j < kSuper; ++j) {
      for (int k = 0; k < kBlock; ++k)
        numbers[k] = static_cast<uint8_t>(((row[32 + 32 * (j / 4) + k] >> (2 * (j % 4))) & 3) | ((row[k] >> j) & 1) << 2);
      put_payload(m.kind, panel + (s * kSuper + j) * payload_bytes(m.kind), output, numbers);
    }
  }
}

// ── IQ4_XS: d, 16 bits of top bits of scales, 4 bytes of their low ones, 128 bytes of nibbles ──
void pack_super_table(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  uint8_t numbers[kBlock];
  for (int s = 0; s < m.blocks / kSuper; ++s, row += 136) {
    uint8_t* scales = panel + m.scales_at + s * scale_bytes(m.kind);
    put_half(scales, output, row);
    const int tops = row[2] | row[3] << 8;
    for (int j = 0; j < kSuper; ++j) {
      const int low = (row[4 + j / 2] >> (4 * (j % 2))) & 15;
      scales[32 + 16 * j + output] = static_cast<uint8_t>((low | ((tops >> (2 * j)) & 3) << 4) - 32);
      for (int k = 0; k < 16; ++k) {
        numbers[k] = row[8 + 16 * j + k] & 15;
        numbers[k + 16] = row[8 + 16 * j + k] >> 4;
      }
      put_payload(m.kind, panel + (s * kSuper + j) * payload_bytes(m.kind), output, numbers);
    }
  }
}

size_t plain_bytes(Kind kind) { return kind == Kind::F32 ? 4 : kind == Kind::F8 ? 1 : 2; }

void pack_plain(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  const size_t size = plain_bytes(m.kind);
  for (int k = 0; k < m.cols; ++k)
    std::memcpy(panel + (static_cast<size_t>(k) * kPanel + output) * size, row + k * size, size);
}

void pack_row(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  switch (m.kind) {
    case Kind::F32: case Kind::F16: case Kind::BF16: return pack_plain(m, panel, output, row);
    case Kind::F8: return pack_eight_bit_floats(m, panel, output, row);
    case Kind::Q6_K: return pack_super_six(m, panel, output, row);
    case Kind::Q4_K: case Kind::Q5_K: return pack_super_min(m, panel, output, row);
    case Kind::Q2_K: return pack_super_two(m, panel, output, row);
    case Kind::Q3_K: return pack_super_three(m, panel, output, row);
    case Kind::IQ4_XS: return pack_super_table(m, panel, output, row);
    default: return pack_simple(m, panel, output, row);
  }
}

}  // namespace

Packing packing_from_name(const std::string& name) {
  static const std::pair<const char*, Packing> known[] = {
      {"Q8_0", {Kind::Q8_0}},
      {"Q4_0", {Kind::Q4_0}},
      {"Q5_0", {Kind::Q5_0}},
      {"Q4_1", {Kind::Q4_1}},
      {"Q5_1", {Kind::Q5_1}},
      {"Q4_K", {Kind::Q4_K}},
      {"Q5_K", {Kind::Q5_K}},
      {"Q6_K", {Kind::Q6_K}},
      {"Q2_K", {Kind::Q2_K}},
      {"Q3_K", {Kind::Q3_K}},
      {"MXFP4", {Kind::MXFP4, 1, &kE2m1}},
      {"IQ4_NL", {Kind::IQ4_NL, 1, &kIq4}},
      {"IQ4_XS", {Kind::IQ4_XS, 1, &kIq4}},
      {"G4", {Kind::G4}},
      {"G8", {Kind::G8}},
      {"NF4", {Kind::T4, 1, &kNf4}},
      {"FP4", {Kind::T4, 1, &kFp4}},
      {"NV4", {Kind::NV4, 1, &kE2m1}},
      {"F32", {Kind::F32}},
      {"F16", {Kind::F16}},
      {"BF16", {Kind::BF16}},
      {"F8", {Kind::F8}}};
  if (name.ends_with('@')) {
    Packing found = packing_from_name(name.substr(0, name.size() - 1));
    if (found.is_ordered || !is_quantised(found.kind)) throw std::invalid_argument("no order of columns in weights of kind " + name);
    found.is_ordered = true;
    return found;
  }
  const size_t colon = name.find(':');
  for (const auto& [text, packing] : known) {
    if (name.substr(0, colon) != text) continue;
    if (colon == std::string::npos) return packing;
    for (const int group : {2, 4})
      if (has_groups(packing.kind) && name.substr(colon + 1) == std::to_string(group)) {
        Packing found = packing;
        found.group = group;
        return found;
      }
  }
  throw std::invalid_argument("no packed form for weights of kind " + name);
}

size_t source_row_bytes(Kind kind, int cols) {
  const size_t blocks = static_cast<size_t>(cols) / kBlock;
  switch (kind) {
    case Kind::Q8_0: return blocks * 34;
    case Kind::Q4_0: case Kind::IQ4_NL: return blocks * 18;
    case Kind::G4: return blocks * 24;
    case Kind::G8: return blocks * 40;
    case Kind::T4: return blocks * 20;
    case Kind::NV4: return blocks * 22;
    case Kind::F8: return blocks * 36;
    case Kind::Q2_K: return blocks / kSuper * 84;
    case Kind::Q3_K: return blocks / kSuper * 110;
    case Kind::IQ4_XS: return blocks / kSuper * 136;
    case Kind::MXFP4: return blocks * 17;
    case Kind::Q4_1: return blocks * 20;
    case Kind::Q5_0: return blocks * 22;
    case Kind::Q5_1: return blocks * 24;
    case Kind::Q4_K: return blocks / kSuper * 144;
    case Kind::Q5_K: return blocks / kSuper * 176;
    case Kind::Q6_K: return blocks / kSuper * 210;
    default: return static_cast<size_t>(cols) * plain_bytes(kind);
  }
}

Matrix matrix_layout(const Packing& packing, int rows, int cols) {
  const Kind kind = packing.kind;
  const bool in_blocks = is_quantised(kind) || kind == Kind::F8;
  const int step = !in_blocks ? 1 : has_supers(kind) ? kBlock * kSuper : kBlock * packing.group;
  if (rows <= 0 || rows > std::numeric_limits<int>::max() - kPanel || cols <= 0 || cols % step != 0)
    throw std::invalid_argument("a matrix of this kind needs columns in multiples of " + std::to_string(step) +
                                ", not " + std::to_string(rows) + " x " + std::to_string(cols));
  Matrix m;
  m.kind = kind;
  m.group = packing.group;
  m.table = packing.table;
  m.is_ordered = packing.is_ordered;
  m.rows = rows;
  m.cols = cols;
  m.panels = (rows + kPanel - 1) / kPanel;
  m.blocks = cols / kBlock;
  m.scales_at = is_quantised(kind) ? static_cast<size_t>(m.blocks) * payload_bytes(kind)
                                   : static_cast<size_t>(cols) * kPanel * plain_bytes(kind);
  const size_t scale_count = !in_blocks ? 0 : has_supers(kind) ? m.blocks / kSuper : m.blocks / m.group;
  const size_t of_panel = kind == Kind::NV4 ? 64 : 0;  // bytes of scales that all blocks of a panel share
  m.panel_bytes = round_up(m.scales_at + of_panel + (in_blocks ? scale_count * scale_bytes(kind) : 0), 64);
  return m;
}

Matrix empty_matrix(const Packing& packing, int rows, int cols) {
  Matrix m = matrix_layout(packing, rows, cols);
  m.owner = unset_pages(m.num_bytes());
  m.data = m.owner.get();
  return m;
}

void pack_panels(const Matrix& m, int first, int last, const uint8_t* source, size_t row_bytes) {
  for (int p = first; p < last; ++p) {
    uint8_t* panel = m.data + static_cast<size_t>(p) * m.panel_bytes;
    std::memset(panel, 0, m.panel_bytes);
    const int outputs = std::min(kPanel, m.rows - p * kPanel);
    for (int o = 0; o < outputs; ++o)
      pack_row(m, panel, o, source + (static_cast<size_t>(p) * kPanel + o) * row_bytes);
  }
}

Matrix pack_matrix(const Packing& packing, int rows, int cols, const uint8_t* source, size_t row_bytes) {
  const Matrix m = empty_matrix(packing, rows, cols);
  pack_panels(m, 0, m.panels, source, row_bytes);
  return m;
}

}  // namespace tokenmill
