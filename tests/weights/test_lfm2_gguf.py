"""LFM2 in GGUF, as llama.cpp's converter writes it: layers without key/value heads are short convolutions."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import UnsupportedModel
from tokenmill.weights.source import open_weights

LAYER_NAMES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.embedding_norm.weight": "token_embd_norm.weight",
        }[name]
    _, _, layer, part = name.split(".", 3)
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def write_gguf(path: Path, directory: Path, spec: ModelSpec, kernel: int | None = 3) -> None:
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv([0, 0, 2, 0, 2])
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(spec.vocab_size)
    if kernel is not None:
        writer.add_shortconv_l_cache(kernel)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in load_file(directory / "model.safetensors").items():
        values = weight.float().squeeze(1) if weight.dim() == 3 else weight.float()
        writer.add_tensor(gguf_name(name), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_same_model_and_weights(tmp_path: Path, lfm2_dir: Path) -> None:
    expected = read_spec(lfm2_dir)
    write_gguf(tmp_path / "model.gguf", lfm2_dir, expected)
    spec = read_spec(tmp_path / "model.gguf")
    assert spec.layers == expected.layers and spec.tied_head
    ours, theirs = open_weights(tmp_path / "model.gguf", spec), open_weights(lfm2_dir, expected)
    ours.check()
    for name in theirs.names():
        assert torch.equal(ours.get(name).data, theirs.get(name).data.float()), name


def test_a_file_without_the_kernel_is_refused(tmp_path: Path, lfm2_dir: Path) -> None:
    write_gguf(tmp_path / "model.gguf", lfm2_dir, read_spec(lfm2_dir), kernel=None)
    with pytest.raises(UnsupportedModel, match=r"shortconv\.l_cache is missing"):
        read_spec(tmp_path / "model.gguf")
