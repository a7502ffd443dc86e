"""GGUF files of every family: written, read back equal, split, damaged; and real ones."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.support.gguf_families import FAMILIES, LLAMA3, SMALL, VOCABULARY
from tokenmill.arch.gguf_file import read_gguf, read_gguf_model
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import FrequencyFactors, LayerSpec, ModelSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import DamagedFile, ModelError, UnsupportedModel
from tokenmill.models.rope import rope_frequencies
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.gguf_write import padded_vocabulary, write_gguf, write_random_gguf
from tokenmill.weights.source import open_weights, row_order


def small_spec(kind: str) -> ModelSpec:
    return spec_from_hf({"model_type": kind, **SMALL, **FAMILIES[kind]})


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_written_model_is_read_back_equal(kind: str, tmp_path: Path) -> None:
    spec, path = small_spec(kind), tmp_path / "model.gguf"
    source = dummy_weights(spec, seed=3)
    write_gguf(path, spec, source, VOCABULARY)
    read = read_spec(path)
    assert replace(read, name=spec.name) == spec
    weights = open_weights(path, read)
    weights.check()
    for name in tensors_of(spec):
        assert torch.equal(weights.get(name).data, source.get(name).data), name


def test_quantised_rows_travel_whole(tmp_path: Path) -> None:
    spec, path = small_spec("llama"), tmp_path / "model.gguf"
    source = dummy_weights(spec, quant="Q8_0")
    write_gguf(path, spec, source, VOCABULARY)
    weights = open_weights(path, read_spec(path))
    stored = read_gguf(path).tensors
    assert stored["blk.0.attn_q.weight"].type == "Q8_0"
    for name in ("layers.0.q.weight", "layers.5.k.weight", "layers.1.down.weight", "embed.weight"):
        assert torch.equal(weights.get(name).data, source.get(name).data)


def test_row_order_undoes_the_converter_s_permutation() -> None:
    heads, head_dim = 3, 8
    ours = np.arange(heads * head_dim * 2).reshape(heads * head_dim, 2)
    # convert_hf_to_gguf.py, LlamaModel.permute
    theirs = ours.reshape(heads, 2, head_dim // 2, 2).swapaxes(1, 2).reshape(ours.shape)
    assert np.array_equal(theirs[row_order(heads * head_dim, heads, head_dim).numpy()], ours)
    assert row_order(10, 1, 4).tolist() == [0, 2, 1, 3, *range(4, 10)]


def test_llama3_scaling_becomes_factors(tmp_path: Path) -> None:
    config = {**SMALL, "model_type": "llama", "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}
    spec, path = spec_from_hf(config), tmp_path / "model.gguf"
    write_gguf(path, spec, dummy_weights(spec), VOCABULARY)
    rope = read_spec(path).layers[0].mixer.rope
    assert rope is not None and isinstance(rope.scaling, FrequencyFactors)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"})
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    inverse, _ = compute(theirs, device=torch.device("cpu"))
    assert torch.allclose(rope_frequencies(rope, 64), inverse, rtol=1e-5)
    open_weights(path, read_spec(path)).check()  # the tensor of factors is not an unexpected weight


def test_vocabulary_is_padded_to_the_model() -> None:
    padded = padded_vocabulary(VOCABULARY, 5)
    assert padded["tokenizer.ggml.tokens"] == ["<unk>", "<s>", "</s>", "[PAD3]", "[PAD4]"]
    assert padded["tokenizer.ggml.token_type"] == [2, 3, 3, 5, 5]
    with pytest.raises(ModelError, match="3 tokens"):
        padded_vocabulary(VOCABULARY, 2)


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    spec = spec_from_hf({**SMALL, "model_type": "qwen2", "layer_types": ["sliding_attention"] * 6, "sliding_window": 9})
    with pytest.raises(UnsupportedModel, match="windows"):
        write_gguf(tmp_path / "model.gguf", spec, dummy_weights(spec), VOCABULARY)


def split_model(tmp_path: Path) -> list[Path]:
    spec, whole = small_spec("llama"), tmp_path / "whole.gguf"
    write_gguf(whole, spec, dummy_weights(spec), VOCABULARY)
    names = [tmp_path / f"part-{number:05d}-of-00002.gguf" for number in (1, 2)]
    reader = gguf.GGUFReader(whole)
    half = len(reader.tensors) // 2
    for index, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        writer = gguf.GGUFWriter(names[index], "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 2)
        if index == 0:
            for key, field in reader.fields.items():
                if key.startswith(("llama.", "tokenizer.")):
                    sub = field.types[-1] if len(field.types) > 1 else None
                    writer.add_key_value(key, field.contents(), field.types[0], sub)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names


def test_split_files_are_one_model(tmp_path: Path) -> None:
    first, second = split_model(tmp_path)
    whole = tmp_path / "whole.gguf"
    assert replace(read_spec(first), name="") == replace(read_spec(whole), name="")
    weights, expected = open_weights(first, read_spec(first)), open_weights(whole, read_spec(whole))
    weights.check()
    for name in weights.names():
        assert torch.equal(weights.get(name).data, expected.get(name).data)
    with pytest.raises(ModelError, match="first part"):
        read_gguf_model(second)
    second.unlink()
    with pytest.raises(ModelError, match="parts are missing: part-00002"):
        read_spec(first)


def test_any_damage_to_a_model_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    spec, path = small_spec("gemma3_text"), tmp_path / "model.gguf"
    write_gguf(path, spec, dummy_weights(spec, quant="Q8_0"), VOCABULARY)
    original, rng, bad = path.read_bytes(), random.Random(5), tmp_path / "bad.gguf"
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    refused = 0
    for _ in range(150):
        data = bytearray(original)
        for _ in range(rng.choice([1, 2, 4])):
            data[rng.randrange(header)] = rng.choice([0, 1, 255, rng.randrange(256)])
        bad.write_bytes(data)
        try:
            damaged_spec = read_spec(bad)
            weights = open_weights(bad, damaged_spec)
            weights.check()
            for name in weights.names():
                dequantize(weights.get(name))
        except (ModelError, MemoryError) as error:
            assert isinstance(error, ModelError), error
            refused += 1
    assert refused > 50


# ── real files ─────────────────────────────────────────────────────────────────────────────────────────


def load_all(path: Path) -> tuple[ModelSpec, dict[str, RawTensor]]:
    spec = read_spec(path)
    weights = open_weights(path, spec)
    weights.check()
    raws = {name: weights.get(name) for name in weights.names()}
    assert {name: raw.shape for name, raw in raws.items()} == {t.name: t.shape for t in tensors_of(spec).values()}
    return spec, raws


def facts(spec: ModelSpec) -> tuple[int, ...]:
    layer: LayerSpec = spec.layers[0]
    attention = layer.mixer
    return spec.num_layers, spec.hidden_size, attention.num_heads, attention.num_kv_heads, spec.vocab_size


def test_smollm2(smollm2_path: Path) -> None:
    spec, raws = load_all(smollm2_path)
    assert facts(spec) == (30, 576, 9, 3, 49152)
    assert spec.tied_head and spec.max_context == 8192 and spec.dtype == "quantised"
    assert spec.eos_token_ids == (2,)  # <|im_end|>; <|endoftext|> is known to the tokenizer
    rope = spec.attentions[0].rope
    assert rope is not None and (rope.theta, rope.rotary_dim) == (100000.0, 64)
    assert {raw.quant for raw in raws.values()} == {"Q8_0", "Q4_1", None}
    stored, data = read_gguf(smollm2_path).tensors, np.memmap(smollm2_path, np.uint8, "r")
    for ours, theirs in (("layers.3.down", "blk.3.ffn_down"), ("layers.0.o", "blk.0.attn_output")):
        place = stored[theirs + ".weight"]
        blocks = data[place.offset : place.offset + place.num_bytes].reshape(place.shape[0], -1)
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[place.type])
        assert torch.equal(dequantize(raws[ours + ".weight"]), torch.from_numpy(expected))


def test_real_file_with_missing_weights_names_them(smollm2_path: Path) -> None:
    spec = read_spec(smollm2_path)
    taller = replace(spec, layers=(*spec.layers, spec.layers[0]), tied_head=False)
    with pytest.raises(DamagedFile) as caught:
        open_weights(smollm2_path, taller).check()
    assert "blk.30.attn_q.weight" in str(caught.value) and "output.weight" in str(caught.value)


@pytest.mark.slow
def test_gemma3(gemma3_path: Path) -> None:
    spec, raws = load_all(gemma3_path)
    assert facts(spec) == (18, 640, 4, 1, 262144)
    assert [layer.mixer.window for layer in spec.layers[:7]] == [512] * 5 + [None, 512]
    thetas = [layer.mixer.rope.theta for layer in spec.layers[4:6] if layer.mixer.rope]
    assert thetas == [10000.0, 1000000.0]
    assert spec.attentions[0].qk_norm and spec.layers[0].has_post_norms
    assert raws["layers.0.attn_norm.weight"].data.min() > 0  # GGUF stores Gemma's norms with the one added
    assert spec.eos_token_ids == (1,)  # <end_of_turn> is known to the tokenizer


@pytest.mark.slow
def test_qwen_coder(qwen_coder_path: Path) -> None:
    spec, raws = load_all(qwen_coder_path)
    assert facts(spec) == (28, 1536, 12, 2, 151936)
    assert spec.attentions[0].qkv_bias and not spec.tied_head
    assert raws["layers.0.k.bias"].shape == (256,)
    assert torch.isfinite(dequantize(raws["layers.0.v.weight"])).all()


def test_random_file_takes_a_real_vocabulary(smollm2_path: Path, tmp_path: Path) -> None:
    spec = replace(small_spec("llama"), vocab_size=50000)
    write_random_gguf(tmp_path / "random.gguf", spec, "Q4_0", vocab_from=smollm2_path)
    file = read_gguf(tmp_path / "random.gguf")
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 50000
    assert file.metadata["tokenizer.ggml.merges"] == read_gguf(smollm2_path).metadata["tokenizer.ggml.merges"]
    assert file.tensors["blk.0.ffn_up.weight"].type == "Q4_0"
    assert file.metadata["general.file_type"] == 2  # mostly Q4_0, in llama.cpp's numbering
