// Repacks GGUF blocks into panels (matrix.h says how a panel lies in memory).
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

// Writes the 32 stored numbers of one output of a block into its place in the payload, four (a group) at a time.
void put_payload(Kind kind, uint8_t* payload, int output, const uint8_t* numbers) {
  const int bits = payload_bits(kind);
  for (int group = 0; group < 8; ++group) {
    const uint32_t four = four_at(numbers + 4 * group);
    if (bits == 8) {
      std::memcpy(payload + 64 * group + 4 * output, &four, 4);
      continue;
    }
    merge_four(payload + 64 * (group % 4) + 4 * output, (four & 0x0F0F0F0Fu) << (group < 4 ? 0 : 4));
    const uint32_t top = (four >> 4) & 0x0F0F0F0Fu;
    if (bits == 6) merge_four(payload + 256 + 64 * (group / 4) + 4 * output, top << (2 * (group % 4)));
    if (bits == 5) {
      const uint32_t nibble = (top | top >> 7 | top >> 14 | top >> 21) & 15u;  // one bit of each byte
      payload[256 + 8 * group + output / 2] |= static_cast<uint8_t>(nibble << (output % 2 * 4));
    }
  }
}

// 2^(exponent - 128) as bfloat: half of what an MXFP4 block's scale says, since the table's numbers are twice its own.
uint16_t half_power(uint8_t exponent) {
  return static_cast<uint16_t>(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
}

void put_half(uint8_t* at, int output, const uint8_t* half) { std::memcpy(at + 2 * output, half, 2); }

// ── simple blocks of 32: [d half] ([m half]) ([fifth bits u32]) payload ──
void unpack_simple(Kind kind, const uint8_t* block, uint8_t* numbers) {
  const uint8_t* p = block + (kind == Kind::MXFP4 ? 1 : has_min(kind) ? 4 : 2);
  if (kind == Kind::Q8_0) {
    for (int k = 0; k < kBlock; ++k) numbers[k] = static_cast<uint8_t>(p[k] ^ 0x80);
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

void pack_simple(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  const size_t block_bytes = source_row_bytes(m.kind, kBlock);
  uint8_t numbers[kBlock];
  for (int b = 0; b < m.blocks; ++b, row += block_bytes) {
    unpack_simple(m.kind, row, numbers);
    put_payload(m.kind, panel + b * payload_bytes(m.kind), output, numbers);
    uint8_t* scales = panel + m.scales_at + b * scale_bytes(m.kind);
    if (m.kind == Kind::MXFP4) {
      const uint16_t scale = half_power(row[0]);
      put_half(scales, output, reinterpret_cast<const uint8_t*>(&scale));
    } else {
      put_half(scales, output, row);
    }
    if (has_min(m.kind)) put_half(scales + 32, output, row + 2);
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

size_t plain_bytes(Kind kind) { return kind == Kind::F32 ? 4 : 2; }

void pack_plain(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  const size_t size = plain_bytes(m.kind);
  for (int k = 0; k < m.cols; ++k)
    std::memcpy(panel + (static_cast<size_t>(k) * kPanel + output) * size, row + k * size, size);
}

void pack_row(const Matrix& m, uint8_t* panel, int output, const uint8_t* row) {
  if (!is_quantised(m.kind)) return pack_plain(m, panel, output, row);
  if (m.kind == Kind::Q6_K) return pack_super_six(m, panel, output, row);
  if (has_supers(m.kind)) return pack_super_min(m, panel, output, row);
  pack_simple(m, panel, output, row);
}

}  // namespace

Kind kind_from_name(const std::string& name) {
  static const std::pair<const char*, Kind> known[] = {
      {"Q8_0", Kind::Q8_0}, {"Q4_0", Kind::Q4_0}, {"Q5_0", Kind::Q5_0}, {"Q4_1", Kind::Q4_1},
      {"Q5_1", Kind::Q5_1}, {"Q4_K", Kind::Q4_K}, {"Q5_K", Kind::Q5_K}, {"Q6_K", Kind::Q6_K},
      {"MXFP4", Kind::MXFP4}, {"IQ4_NL", Kind::IQ4_NL},
      {"F32", Kind::F32},   {"F16", Kind::F16},   {"BF16", Kind::BF16}};
  for (const auto& [text, kind] : known)
    if (name == text) return kind;
  throw std::invalid_argument("no packed form for weights of kind " + name);
}

size_t source_row_bytes(Kind kind, int cols) {
  const size_t blocks = static_cast<size_t>(cols) / kBlock;
  switch (kind) {
    case Kind::Q8_0: return blocks * 34;
    case Kind::Q4_0: case Kind::IQ4_NL: return blocks * 18;
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

Matrix matrix_layout(Kind kind, int rows, int cols) {
  const int step = !is_quantised(kind) ? 1 : has_supers(kind) ? kBlock * kSuper : kBlock;
  if (rows <= 0 || rows > std::numeric_limits<int>::max() - kPanel || cols <= 0 || cols % step != 0)
    throw std::invalid_argument("a matrix of this kind needs columns in multiples of " + std::to_string(step) +
                                ", not " + std::to_string(rows) + " x " + std::to_string(cols));
  Matrix m;
  m.kind = kind;
  m.rows = rows;
  m.cols = cols;
  m.panels = (rows + kPanel - 1) / kPanel;
  m.blocks = cols / kBlock;
  if (is_quantised(kind)) {
    m.scales_at = static_cast<size_t>(m.blocks) * payload_bytes(kind);
    const size_t scale_count = has_supers(kind) ? m.blocks / kSuper : m.blocks;
    m.panel_bytes = round_up(m.scales_at + scale_count * scale_bytes(kind), 64);
  } else {
    m.panel_bytes = round_up(static_cast<size_t>(cols) * kPanel * plain_bytes(kind), 64);
  }
  return m;
}

Matrix empty_matrix(Kind kind, int rows, int cols) {
  Matrix m = matrix_layout(kind, rows, cols);
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

Matrix pack_matrix(Kind kind, int rows, int cols, const uint8_t* source, size_t row_bytes) {
  const Matrix m = empty_matrix(kind, rows, cols);
  pack_panels(m, 0, m.panels, source, row_bytes);
  return m;
}

}  // namespace tokenmill
