"""GGUF files of dense families, as llama.cpp's converter writes them. Read back they are the checkpoint's model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from tests.support.dense_models import DENSE
from tests.support.gguf_converted import CONVERTERS, Config, write_converted
from tests.support.gguf_dense import DENSE_CONVERTERS, xielu_metadata
from tests.support.gguf_logits import expect_logits
from tests.support.tiny_models import load_ours, make_reference
from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.read import read_spec

RMS_EPS = {"rms_norm_eps": 2.0**-20}  # exact in float32, which is what GGUF stores
EPS, EPSILON = {"layer_norm_eps": 2.0**-20}, {"layer_norm_epsilon": 2.0**-20}
FALCON = {**EPSILON, "max_position_embeddings": 2048}
OTHER_ROPE = ("apertus", "hunyuan_v1_dense")  # factors of frequencies in a tensor; a base that is rounded to float32
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings")
MINICPM = {"scale_emb": 12, "dim_model_base": 256, "v_head_dim": 12}  # its own, which files do not have
# name: (architecture, sizes in place of the tiny model's own)
MODELS: dict[str, tuple[str, Config]] = {
    "gemma": ("gemma", RMS_EPS),
    "glm": ("chatglm", RMS_EPS),
    "glm4": ("glm4", RMS_EPS),
    "arcee": ("arcee", RMS_EPS),
    "cohere": ("command-r", {**EPS, "attention_bias": False}),
    "nemotron": ("nemotron", {"norm_eps": 2.0**-20}),
    "jais2": ("jais2", EPS),
    "minicpm3": (
        "minicpm3",
        {**RMS_EPS, **MINICPM, "rope_parameters": {"rope_theta": 1e4}},
    ),
    "youtu": ("deepseek2", RMS_EPS),
    "olmo": ("olmo", {"clip_qkv": 0.75}),
    "apertus": ("apertus", RMS_EPS),
    "gpt_neox": ("gptneox", EPS),
    "gpt_neox_sequential": ("gptneox", EPS),
    "falcon": ("falcon", {**FALCON, "ffn_hidden_size": 192}),
    "falcon_40b": ("falcon", {**FALCON, "bias": False}),
    "falcon_11b": ("falcon", FALCON),
    "gpt2": ("gpt2", {**EPSILON, "n_inner": 192, "scale_attn_by_inverse_layer_idx": False}),
    "gpt_bigcode": ("starcoder", {**EPSILON, "n_inner": 192}),
    "bloom": ("bloom", {**EPSILON, "max_position_embeddings": 48}),
    "mpt": ("mpt", {**EPSILON, "attn_config": {"clip_qkv": 0.75}}),
    "phi": ("phi2", EPS),
    "stablelm": ("stablelm", EPS),
    "stablelm_parallel": ("stablelm", EPS),
    "hunyuan_v1_dense": ("hunyuan-dense", RMS_EPS),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_checkpoint_s_model(name: str, tmp_path: Path) -> None:
    arch, sizes = MODELS[name]
    theirs = make_reference(name, **sizes)
    checkpoint = load_ours(theirs, tmp_path)
    config: Config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    config |= {key: getattr(theirs.config, key, None) for key in SIZES}  # which some families call otherwise
    converter = DENSE_CONVERTERS.get(name) or DENSE_CONVERTERS.get(arch) or CONVERTERS[arch]
    more = xielu_metadata(tensors, theirs.config.num_hidden_layers) if arch == "apertus" else None
    write_converted(tmp_path / "model.gguf", arch, config, tensors, converter=converter, more=more)
    spec = read_spec(tmp_path / "model.gguf")
    expected = checkpoint.spec
    assert (spec.norm, spec.max_context, spec.num_positions) == (
        expected.norm,
        expected.max_context,
        expected.num_positions,
    )
    assert spec.layers == expected.layers or name in OTHER_ROPE
    expect_logits(tmp_path / "model.gguf", spec, theirs)


def test_every_family_with_files_of_its_own_is_compared() -> None:
    without = ("ministral", "gpt_bigcode_all_heads", "bloom_odd_heads")  # files of others, or not converted
    model_types = {name: str(getattr(transformers, kind).model_type) for name, (kind, _) in DENSE.items()}
    others = {BY_MODEL_TYPE[model_types[name]].gguf and name for name in DENSE if name not in (*MODELS, *without)}
    assert others <= {None}
