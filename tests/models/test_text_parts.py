"""The text parts of multimodal models through the paged path, against the whole models of transformers given text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.support.gguf_converted import write_converted
from tests.support.native_models import native_model
from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_models import CURRENT, FAMILIES, HALF_ROPE, SIZES, VOCAB, load_ours, make_reference, randomised
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.read import read_spec
from tokenmill.arch.text_parts import MULTIMODAL
from tokenmill.errors import UnsupportedModel
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.ops.cpu import is_available, unsupported_reason
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.source import open_weights

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "embed_dim": 32, "out_hidden_size": 48, "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0], "encoder_layers": 1, "encoder_attention_heads": 2, "d_model": 32,
    "encoder_ffn_dim": 32, "mlp_dim": 32, "output_channels": 8, "num_key_value_heads": 2,
}  # fmt: skip
"""Sizes of parts that see and hear, under all the keys that they are given by"""
SECTIONS = {"qwen2_vl": [2, 2, 2], "qwen2_5_vl": [2, 2, 2], "qwen3_vl": [4, 2, 2], "qwen3_vl_moe": [4, 2, 2],
            "glm4v_moe": [1, 1, 1]}  # fmt: skip
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("qwen2", {}),
    "qwen2_5_vl": ("qwen2", {}),
    "qwen3_vl": ("qwen3", {}),
    "qwen3_vl_moe": ("qwen3_moe", {"moe_intermediate_size": 20}),
    "glm4v_moe": ("glm4_moe", {"use_qk_norm": None}),
    "gemma4_unified": (
        "gemma4_moe",
        {"hidden_size_per_layer_input": None, "enable_moe_block": None, "num_experts": None, "top_k_experts": None,
         "moe_intermediate_size": None},
    ),
}  # fmt: skip
TEXT["step3p7"] = (
    "qwen3",
    {"num_hidden_layers": 4,
     "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
     "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "sliding_window": 9, "num_sliding_attention_heads": 6,
     "rope_theta": [1e6, 1e4, 1e4, 1e6], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
     "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                      "original_max_position_embeddings": 64},
     "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "share_expert_dim": 28,
     "moe_router_scaling_factor": 1.7, "swiglu_limits": [0.0, 0.0, 7.0, 7.0],
     "swiglu_limits_shared": [16.0, 0.0, 0.0, 16.0]},
)  # fmt: skip
TEXT["minimax_m3_vl"] = (
    "qwen3",
    {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2,
     "index_head_dim": 12, "index_block_size": 4, "index_topk_blocks": 3, "rotary_dim": 8,
     "rope_parameters": HALF_ROPE, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_local_experts": 5,
     "num_experts_per_tok": 2, "intermediate_size": 20, "dense_intermediate_size": 56,
     "shared_intermediate_size": 28, "bos_token_id": 1},
)  # fmt: skip
"""By models with a text part of their own kind: whose sizes it has, and what differs"""
NEEDS_NATIVE = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
COMMON = ("kimi_k25", "mistral3", *TEXT)


@pytest.mark.parametrize(
    "name", [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in MULTIMODAL if name not in COMMON)]
)
def test_text_is_read_as_the_whole_model_reads_it(name: str, tmp_path: Path) -> None:
    theirs = make_multimodal(name)
    save(theirs, tmp_path)
    spec = read_spec(tmp_path)
    assert spec.text_part_of == (name if name in MULTIMODAL else "")
    compare(load(tmp_path), theirs)


def test_experts_of_published_files_are_transposed(tmp_path: Path) -> None:
    """transformers 5 writes Qwen3-VL's experts the other way round than their files are."""
    theirs = make_multimodal("qwen3_vl_moe")
    save(theirs, tmp_path)
    file = tmp_path / "model.safetensors"
    found = {
        name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in load_file(file).items()
    }
    assert found["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 48, 40)
    save_file(found, file, metadata={"format": "pt"})
    compare(load(tmp_path), theirs)


def test_ministral3_is_the_text_part_of_mistral3(tmp_path: Path) -> None:
    theirs = make_multimodal("mistral3", "ministral3")
    theirs.save_pretrained(tmp_path)
    assert read_spec(tmp_path).family == "ministral3"
    compare(load(tmp_path), theirs)


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=NEEDS_NATIVE)])
def test_limits_of_activations_are_reached(is_native: bool, tmp_path: Path) -> None:
    """Step-3.7 with weights so large that activations exceed 7 and 16; without limits its logits are others."""
    theirs = make_multimodal("step3p7")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if any(part in name for part in ("gate_up_proj", "gate_proj", "up_proj")):
                parameter.mul_(8)
    save(theirs, tmp_path)
    compare(load(tmp_path, is_native=is_native), theirs)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"swiglu_limits": None, "swiglu_limits_shared": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="not close"):
        compare(load(tmp_path, is_native=is_native), theirs)


@NEEDS_NATIVE
def test_native_kernels_attend_to_chosen_blocks(tmp_path: Path) -> None:
    """MiniMax-M3 with blocks of 16 tokens, of which two are chosen among three"""
    theirs = make_multimodal("minimax_m3_vl", index_block_size=16, index_topk_blocks=2)
    save(theirs, tmp_path)
    compare(load(tmp_path, is_native=True), theirs)


def test_a_file_of_step_is_the_checkpoint_s_model(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it, whose factors of frequencies are those of the llama3 scaling"""
    scaling = {"rope_scaling": None, "rms_norm_eps": 2.0**-20, "moe_router_scaling_factor": 1.5}
    theirs = make_multimodal("step3p7", **scaling)
    save(theirs, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    write_converted(tmp_path / "model.gguf", "step35", config, load_file(tmp_path / "model.safetensors"))
    spec = read_spec(tmp_path / "model.gguf")
    assert spec.layers == read_spec(tmp_path).layers
    weights = open_weights(tmp_path / "model.gguf", spec)
    weights.check()
    compare(Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, torch.device("cpu"))), theirs)


def test_phi4_multimodal_reads_text_without_its_adapters(tmp_path: Path) -> None:
    parts = {"vision_config": {**SMALL, "image_size": 28, "feature_layer": -1}, "audio_config": AUDIO}
    sizes = {**SIZES, "original_max_position_embeddings": 256}
    config = transformers.Phi4MultimodalConfig(**sizes, **parts)
    config._attn_implementation = "eager"
    theirs = randomised(transformers.Phi4MultimodalForCausalLM(config))
    theirs.save_pretrained(tmp_path)
    compare(load(tmp_path), theirs)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for name in [name for name in tensors if name.startswith("model.layers.") and name.endswith("_proj.weight")]:
        module = name.removesuffix("weight")
        tensors[module + "base_layer.weight"] = tensors.pop(name)
        tensors |= {f"{module}lora_{part}.{kind}.weight": torch.ones(2, 2) for part in "AB" for kind in KINDS}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "phi4mm"}))
    compare(load(tmp_path), theirs)


KINDS = ("vision", "speech")
AUDIO: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 32,
    "nemo_conv_channels": 8, "depthwise_separable_out_channel": 32, "input_size": 16, "downsample_rate": 1,
}  # fmt: skip


def test_phi35_vision_is_phi3_with_a_part_that_sees(tmp_path: Path) -> None:
    theirs = make_reference("phi3_longrope")
    load_ours(theirs, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "phi3_v", "img_processor": {}}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.vision_embed_tokens.img_projection.0.weight"] = torch.zeros(8, 16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    compare(load(tmp_path), theirs)


def test_a_text_part_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"llava: .*'xlnet'"):
        spec_from_hf({"model_type": "llava", "text_config": {**SIZES, "model_type": "xlnet"}})
    with pytest.raises(UnsupportedModel, match="paligemma"):  # its prompts are read in both directions
        spec_from_hf({"model_type": "paligemma", "text_config": {**SIZES, "model_type": "gemma2"}})


def test_a_part_missing_from_the_text_is_named(tmp_path: Path) -> None:
    make_multimodal("llava").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["language_model.model.layers.0.surprise"] = tensors.pop("language_model.model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"missing: language_model\.model\.norm.*unexpected: .*surprise"):
        load(tmp_path)


def make_multimodal(name: str, text_type: str | None = None, **others: Any) -> transformers.PreTrainedModel:
    """A whole model of small parts with random weights; `others`: sizes of the text part in place of its own"""
    kind = CONFIG_MAPPING[name]
    plain = kind()
    of_type = text_type or plain.get_text_config().model_type
    like, changes = TEXT.get(name, (of_type, {}))
    text = {**SIZES, **{**FAMILIES, **CURRENT}[like][1], **changes, **others, "model_type": of_type}
    text = {key: value for key, value in text.items() if value is not None}
    if name in SECTIONS:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS[name]}
        text["rope_parameters"] = {**text.get("rope_parameters", {}), **rope}
    given = {key: getattr(plain, key, None) for key in ("vision_config", "audio_config")}
    parts = {key: small_part(part) for key, part in given.items() if part is not None}
    config = kind(text_config=text, **parts)
    config._attn_implementation = "eager"
    return randomised(model_class(name)(config))


def small_part(plain: Any) -> dict[str, Any]:
    keys = plain.to_dict()
    return {**{key: value for key, value in SMALL.items() if key in keys}, "model_type": plain.model_type}


def model_class(name: str) -> Any:
    plain = CONFIG_MAPPING[name].__name__.removesuffix("Config")
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(name, f"{plain}ForConditionalGeneration")
    return getattr(transformers, found)


def save(theirs: transformers.PreTrainedModel, folder: Path) -> None:
    """Save under the names of published files. Of Kimi's layers, transformers writes other names than it reads."""
    theirs.save_pretrained(folder)
    file = folder / "model.safetensors"
    found = load_file(file)
    renamed = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): found[name] for name in found
    }
    if renamed.keys() != found.keys():
        save_file(renamed, file, metadata={"format": "pt"})


def load(folder: Path, *, is_native: bool = False) -> Decoder | NativeDecoder:
    spec = read_spec(folder)
    weights = open_weights(folder, spec)
    weights.check()
    if is_native:
        assert unsupported_reason(ComputeRequest(spec, "cpu", "float32", "float32", 16)) is None
        return native_model(spec, weights, max_context=spec.max_context)
    return Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, torch.device("cpu")))


def compare(ours: Decoder | NativeDecoder, theirs: transformers.PreTrainedModel) -> None:
    tokens = torch.randint(3, VOCAB, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([tokens])).logits[0]
    run = PagedRun(ours, num_rows=2, max_len=48, block_size=16)
    torch.testing.assert_close(feed_in_chunks(run, 0, tokens, 7), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(run.feed({1: tokens}), expected, atol=2e-4, rtol=0)
    assert float(expected.std()) > 0.1, "flat logits prove little"
