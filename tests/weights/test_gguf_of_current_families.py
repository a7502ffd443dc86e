"""GGUF files of current families, written as llama.cpp's converter writes them: tensor names by the `gguf` package's
own map, metadata by its writer, rows permuted where it permutes them. Read back they are the checkpoint's model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tests.support.gguf_converted import stacked
from tests.support.gguf_families import VOCABULARY
from tests.support.mtp_heads import add_head, make_head
from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_models import VOCAB, load_ours, make_reference
from tokenmill.arch.read import read_spec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.gguf_write import padded_vocabulary
from tokenmill.weights.source import open_mtp_head, open_weights

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
EPS = {"rms_norm_eps": 2.0**-20}  # exact in float32, which is what GGUF stores
LAYERS = {"num_hidden_layers": 4}
# family: (architecture's name, sizes in place of the tiny model's own)
FAMILIES: dict[str, tuple[str, Config]] = {
    "exaone4": ("exaone4", {**EPS, **LAYERS}),
    "exaone4_no_windows": ("exaone4", EPS),
    "glm4_moe": ("glm4moe", {**EPS, "routed_scaling_factor": 1.5}),
    "gpt_oss": ("gpt-oss", EPS),
    "granite": ("granite", {**EPS, "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.25,
                            "attention_multiplier": 0.125}),
    "lfm2_moe": ("lfm2moe", {"norm_eps": 2.0**-20}),
    "minimax_m2": ("minimax-m2", EPS),
    "olmo2": ("olmo2", EPS),
    "olmo3": ("olmo2", EPS),
    "seed_oss": ("seed_oss", EPS),
    "smollm3": ("smollm3", {**EPS, "num_hidden_layers": 5, "no_rope_layer_interval": 4}),
}  # fmt: skip
PERMUTED = ("granite", "smollm3")  # rows of queries and keys, as of Llama
OWN_KEYS = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention_scale", "logits_scaling": "logit_scale"}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_is_the_checkpoint_s_model(name: str, tmp_path: Path) -> None:
    arch, sizes = FAMILIES[name]
    theirs = make_reference(name, **sizes)
    checkpoint = load_ours(theirs, tmp_path)
    config: Config = json.loads((tmp_path / "config.json").read_text())
    path = tmp_path / "model.gguf"
    write(path, arch, config, load_file(tmp_path / "model.safetensors"), is_permuted=name in PERMUTED)
    spec = read_spec(path)
    assert comparable(spec) == comparable(checkpoint.spec)
    weights = open_weights(path, spec)
    weights.check()
    model = Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, torch.device("cpu")))
    tokens = torch.randint(3, VOCAB, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    expected, found = (feed_in_chunks(PagedRun(one, 1, 32), 0, tokens, 7) for one in (checkpoint, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(found, theirs(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=0)


def comparable(spec: Any) -> Any:
    """A spec without what only one of the two kinds of files says."""
    return replace(spec, name="", dtype="", bos_token_id=None, eos_token_ids=())


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """MTP layers are the last blocks of a GGUF file (GLM-4.5), and its number of blocks includes them."""
    checkpoint = load_ours(make_reference("glm4_moe", **EPS), tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), "num_nextn_predict_layers": 1}
    tensors = load_file(tmp_path / "model.safetensors")
    further = {
        name.replace("layers.2.", "layers.3."): tensor for name, tensor in tensors.items() if "layers.2." in name
    }
    write(tmp_path / "model.gguf", "glm4moe", config, {**tensors, **further}, is_permuted=False)
    spec = read_spec(tmp_path / "model.gguf")
    assert (spec.num_layers, spec.num_extra_layers) == (3, 1) and checkpoint.spec.num_layers == 3
    open_weights(tmp_path / "model.gguf", spec).check()


def test_heads_that_predict_further_tokens_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    theirs = make_reference("glm4_moe", **EPS)
    load_ours(theirs, tmp_path)
    add_head(make_head(theirs), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "model.gguf", "glm4moe", config, load_file(tmp_path / "model.safetensors"), is_permuted=False)
    expected, found = (open_mtp_head(path, read_spec(path)) for path in (tmp_path, tmp_path / "model.gguf"))
    assert expected.names() == found.names() and "join.weight" in found.names()
    for name in expected.names():
        torch.testing.assert_close(dequantize(found.get(name)), dequantize(expected.get(name)), atol=0, rtol=0)


# ── as the converter writes ────────────────────────────────────────────────────────────────────────────


def write(path: Path, arch: str, config: Config, tensors: Tensors, *, is_permuted: bool) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in padded_vocabulary(VOCABULARY, config["vocab_size"]).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    add_metadata(writer, config)
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    blocks = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    names = gguf.get_tensor_name_map(kind, blocks)
    for name, tensor in stacked(tensors).items():
        if is_permuted and re.search(r"[qk]_proj", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if name.endswith("conv.conv.weight"):
            tensor = tensor.squeeze(1)
        for ours, part in parts_of(name, tensor):
            found = names.get_name(ours, try_suffixes=(".weight", ".bias"))
            assert found is not None, ours
            writer.add_tensor(found, part.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, config: Config) -> None:
    further, text = config.get("num_nextn_predict_layers") or 0, config
    writer.add_block_count(text["num_hidden_layers"] + further)
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_head_count(text["num_attention_heads"])
    kinds = text.get("layer_types") or []
    heads = text["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind != "conv" else 0 for kind in kinds] if "conv" in kinds else heads)
    writer.add_layer_norm_rms_eps(text.get("rms_norm_eps") or text["norm_eps"])
    dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if text.get("head_dim"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    rope = text["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if text.get("sliding_window") and "sliding_attention" in kinds:
        writer.add_sliding_window(text["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    add_experts(writer, text)
    for key, theirs in OWN_KEYS.items():
        if key in text:
            getattr(writer, f"add_{theirs}")(text[key])
    if "conv_L_cache" in text:
        writer.add_shortconv_l_cache(text["conv_L_cache"])
    if further:
        writer.add_nextn_predict_layers(further)


def add_experts(writer: gguf.GGUFWriter, text: Config) -> None:
    count = next((text[key] for key in ("n_routed_experts", "num_local_experts", "num_experts") if key in text), 0)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(text["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(text.get("moe_intermediate_size") or text["intermediate_size"])
    adds: dict[str, Callable[[Any], None]] = {
        "n_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "norm_topk_prob": writer.add_expert_weights_norm,
    }
    for key, add in adds.items():
        if text.get(key) is not None:
            add(text[key])
    if text["model_type"] != "gpt_oss":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def parts_of(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The names that the package's map knows, and what of a tensor goes there"""
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)]
    if name.endswith("expert_bias"):
        return [(name.replace("expert_bias", "expert_bias.bias"), tensor)]
    lfm2 = re.fullmatch(r"(.*feed_forward\.experts)\.(w[123])\.weight", name)
    if lfm2 is not None:
        part = {"w1": "gate", "w2": "down", "w3": "up"}[lfm2[2]]
        return [(f"{lfm2[1].replace('feed_forward', 'mlp')}.{part}_proj.weight", tensor)]
    if name.endswith("sinks"):
        return [(name + ".weight", tensor)]
    if "experts.gate_up_proj" in name or ("experts.down_proj" in name and name.endswith(("down_proj", "proj_bias"))):
        is_bias = name.endswith("_bias")
        base, tensor = name.removesuffix("_bias"), tensor if is_bias else tensor.transpose(1, 2)
        ending = ".bias" if is_bias else ".weight"
        if base.endswith("down_proj"):
            return [(base + ending, tensor)]
        gate, up = base.replace("gate_up", "gate"), base.replace("gate_up", "up")
        return [(gate + ending, tensor[:, 0::2]), (up + ending, tensor[:, 1::2])]
    return [(name, tensor)]
