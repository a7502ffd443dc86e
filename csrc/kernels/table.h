// Fills the table of one instruction set. Included last by each isa_*.cpp, which selects TM_ISA and the vector types.
#pragma once

namespace tokenmill::TM_ISA {

inline Kernels make_table(const char* name) {
  Kernels k{};
  k.name = name;
  k.small_rows = kSmallRows;
  k.tile_rows = k.wide_tile_rows = kTileRows;
  k.linear_scratch_bytes = linear_scratch_bytes;
  k.linear = linear;
  k.quantise = quantise;
  k.mark_outliers = mark_outliers;
  k.gate = gate;
  k.gate_rows = gate_rows;
  k.xielu = xielu;
  k.rms_norm = rms_norm;
  k.layer_norm = layer_norm;
  k.add = add_into;
  k.multiply = multiply;
  k.scale = scale;
  k.sigmoid = sigmoid_all;
  k.short_conv = short_conv;
  k.silu = silu_all;
  k.unit_vector = unit_vector;
  k.recur_token = recur_token;
  k.scan_token = scan_token;
  k.next_state = next_state;
  k.embed = embed;
  k.rotate = rotate;
  k.write_kv = write_kv;
  k.attention_scratch_bytes = attention_scratch_bytes;
  k.query_tile = kQueryTile;
  k.attend = attend;
  k.finish = finish;
  k.join = join;
  k.entry_scratch_floats = entry_scratch_floats;
  k.attend_entries = attend_entries;
  k.write_entry = write_entry;
  k.mix_by_gates = mix_by_gates;
  k.index_scores = index_scores;
  k.index_scratch_floats = kIndexScratchFloats;
  k.softcap = softcap;
  k.take_best = take_best;
  k.softmax_row = softmax_row;
  k.draw_token = draw_token;
  return k;
}

}  // namespace tokenmill::TM_ISA
