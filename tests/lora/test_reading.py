"""Files that are no adapter of the model, or say what is not implemented, are refused by name; GGUF is read too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapted_models import AdaptableModel, adaptable_model
from tests.support.paged_run import PagedRun
from tests.support.random_adapters import llama_shapes, plain_config, random_tensor, write_adapter
from tests.support.tiny_models import load_ours, make_reference
from tokenmill.errors import DamagedFile, ModelError, TokenmillError, UnsupportedModel
from tokenmill.lora.read import read_adapter
from tokenmill.lora.sizes import adapter_size
from tokenmill.weights.source import row_order

SIZES = {"q_proj": (64, 64)}
SHAPES = llama_shapes(SIZES, 5, 4)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
TOKENS = [1, 403, 407, 261, 378]


@pytest.fixture(scope="module")
def stories(stories_dir: Path) -> AdaptableModel:
    return adaptable_model(stories_dir, "reference", 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"a_method_of_next_year": {"x": 1}}, "a_method_of_next_year"),
        ({"r": "four"}, "r is"),
        ({"r": 5}, "rank 4"),
        ({"rank_pattern": {"q_proj": 9}}, "rank 4"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern"),
        ({"rank_pattern": {"(": 4}}, "regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "v_proj"]}, "v_proj"),
        ({"target_modules": r".*\.(q|k)_proj"}, "k_proj"),
        ({"use_dora": True}, "lora_magnitude_vector"),
    ],
)
def test_configs_that_are_refused(stories: AdaptableModel, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TokenmillError, match=said):
        stories.read(write_adapter(tmp_path, plain_config(**changes), SHAPES))


def test_what_says_nothing_is_taken(stories: AdaptableModel, tmp_path: Path) -> None:
    quiet = {
        "megatron_config": None,
        "arrow_config": None,
        "use_bdlora": None,
        "loftq_config": {},
        "inference_mode": True,
    }
    quiet |= {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "layers_to_transform": None}
    adapter = stories.read(write_adapter(tmp_path, plain_config(**quiet), SHAPES))
    assert adapter.rank == 4 and len(adapter.matrices) == 5
    assert adapter_size(tmp_path) == (4, adapter.num_values, 0)


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def with_tensor(name: str, shape: list[int]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, random_tensor(name, shape))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(f"{FIRST}.lora_A.weight"), "no lora_A"),
        (with_tensor(f"{FIRST}.lora_A.weight", [4, 63]), "the matrix is"),
        (with_tensor(f"{FIRST}.lora_B.weight", [65, 4]), "the matrix is"),
        (with_tensor(f"{FIRST}.lora_B.weight", [64, 3]), "the matrix is"),
        (with_tensor(f"{FIRST}.lora_A.weight", [4]), "shape"),
        (with_tensor(f"{FIRST}.lora_C.weight", [4, 4]), "lora_C"),
        (with_tensor("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", [4, 64]), "layers.9"),
        (with_tensor("base_model.model.model.norm.lora_A.weight", [4, 64]), "norm"),
        (with_tensor("base_model.model.lm_head.weight", [512, 64]), "trained as a whole"),
        (lambda tensors: tensors[f"{FIRST}.lora_A.weight"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors.update({n: t.to(torch.int32) for n, t in tensors.items()}), "dtype"),
        (lambda tensors: tensors.clear(), "target_modules|no adapter"),
    ],
)
def test_tensors_that_are_refused(
    stories: AdaptableModel, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    file = write_adapter(tmp_path, plain_config(), SHAPES) / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(TokenmillError, match=said):
        stories.read(tmp_path)


def test_files_that_are_refused(stories: AdaptableModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        stories.read(tmp_path / "nothing")
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(UnsupportedModel, match="pickle"):
        stories.read(tmp_path)
    write_adapter(tmp_path, plain_config(), SHAPES)
    whole = (tmp_path / "adapter_model.safetensors").read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        (tmp_path / "adapter_model.safetensors").write_bytes(whole[:size])
        with pytest.raises(DamagedFile):
            stories.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(DamagedFile):
        stories.read(tmp_path)


def test_the_digest_is_that_of_the_content(stories: AdaptableModel, tmp_path: Path) -> None:
    first = stories.read(write_adapter(tmp_path / "a", plain_config(), SHAPES)).digest
    assert stories.read(write_adapter(tmp_path / "b", plain_config(), SHAPES)).digest == first
    assert stories.read(write_adapter(tmp_path / "c", plain_config(lora_alpha=9), SHAPES)).digest != first


def gguf_adapter(path: Path, peft: Path, heads: dict[str, int], **metadata: Any) -> Path:
    """A PEFT adapter of attention as llama.cpp's converter writes it, with the rows of heads in its order."""
    config = json.loads((peft / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", metadata.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", metadata.get("alpha", float(config["lora_alpha"])))
    for name, tensor in load_file(peft / "adapter_model.safetensors").items():
        _, _, _, _, layer, _, module, part, _ = name.split(".")
        letter = module[0]
        if part == "lora_B" and letter in heads:
            order = row_order(tensor.shape[0], heads[letter], tensor.shape[0] // heads[letter])
            reordered = torch.empty_like(tensor)
            reordered[order] = tensor
            tensor = reordered
        if metadata.get("stacked"):
            tensor = tensor.repeat(2, 1, 1)
        writer.add_tensor(f"blk.{layer}.attn_{letter}.weight.{part.lower()}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_adapter_is_the_peft_adapter_it_was_made_from(stories: AdaptableModel, tmp_path: Path) -> None:
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64)}
    config = plain_config(target_modules=list(sizes))
    peft = write_adapter(tmp_path / "peft", config, llama_shapes(sizes, 5, 4))
    stories.put(1, peft)
    stories.put(2, gguf_adapter(tmp_path / "adapter.gguf", peft, {"q": 8, "k": 4}))
    logits = PagedRun(stories.model, 2, 16, adapters=[1, 2]).feed({0: TOKENS, 1: TOKENS})
    torch.testing.assert_close(logits[5:], logits[:5], atol=1e-5, rtol=0)
    assert adapter_size(tmp_path / "adapter.gguf") == adapter_size(peft)
    with pytest.raises(UnsupportedModel, match="adapter"):
        stories.read(gguf_adapter(tmp_path / "other.gguf", peft, {}, kind="control"))


@pytest.mark.parametrize("fault", [{"alpha": math.nan}, {"alpha": math.inf}, {"stacked": True}])
def test_damaged_gguf_adapters_are_refused(stories: AdaptableModel, tmp_path: Path, fault: dict[str, Any]) -> None:
    """A scale that is not finite would turn answers into NaN; stacked factors belong to experts only."""
    sizes = {"v_proj": (32, 64)}
    peft = write_adapter(tmp_path / "peft", plain_config(target_modules=list(sizes)), llama_shapes(sizes, 5, 4))
    with pytest.raises(DamagedFile):
        stories.read(gguf_adapter(tmp_path / "adapter.gguf", peft, {}, **fault))


def test_an_adapter_of_a_file_with_quantised_weights(stories_dir: Path, shared_dir: Path, tmp_path: Path) -> None:
    """Rounded activations and weights beside an adapter in full precision: near what the plain model computes."""
    adapter = shared_dir / "goldens" / "tiny" / "adapters" / "lora_r8_upper"
    results = []
    for bits in ("16", "8"):
        loaded = adaptable_model(
            stories_dir, "cpu", 1, activation_bits=bits, quantization="int8" if bits == "8" else "none"
        )
        loaded.put(1, adapter)
        results.append(PagedRun(loaded.model, 2, 16, block_size=16, adapters=[1, 0]).feed({0: TOKENS, 1: TOKENS}))
    assert (results[0][:5] - results[0][5:]).abs().max() > 3.0  # what the adapter does
    assert (results[0] - results[1]).abs().max() < 0.5


def test_adapters_of_transposed_matrices(tmp_path: Path) -> None:
    """GPT-2's files have rows and columns exchanged; the adapters' factors do not, whatever `fan_in_fan_out` says."""
    spec = load_ours(make_reference("gpt2"), tmp_path / "model").spec
    name, hidden = "base_model.model.transformer.h.1.attn.c_attn", spec.hidden_size
    a, b = torch.randn(4, hidden), torch.randn(3 * hidden, 4)
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = plain_config(target_modules=["c_attn"], layers_to_transform=[1], fan_in_fan_out=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    found = read_adapter(folder, spec, lambda _: torch.empty(0)).matrices
    parts = [found[f"layers.1.{part}"] for part in ("q", "k", "v")]
    scale = config["lora_alpha"] / config["r"]
    torch.testing.assert_close(torch.cat([part.b @ part.a for part in parts]), scale * (b @ a))
