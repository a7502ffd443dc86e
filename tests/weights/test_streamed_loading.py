"""Loading a checkpoint in several files takes its packed weights and a matrix at a time, never the file twice: what a
model of any size relies on. Measured in a process of its own, as memory that is not a mapped file's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.quantised_models import CONFIGS, WRITERS
from tokenmill.ops.cpu import is_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available()[0], reason=is_available()[1]),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc"),
]

HIDDEN, WIDE, LAYERS = 1024, 4096, 24
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": HIDDEN,
    "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (WIDE, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, WIDE),
}
SCRIPT = """
import sys, threading
def anonymous():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))
import torch
from tokenmill import LLM, SamplingParams
peak, is_done = [0], threading.Event()
def watch():
    while not is_done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
llm = LLM(sys.argv[1], device="cpu", backend="cpu", threads=1, max_context=64, num_blocks=16, packed_cache=False)
(answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0), progress=False)
is_done.set()
watcher.join()
assert len(answer.outputs[0].token_ids) == 2
print(max(peak[0], anonymous()) - before, anonymous() - before, llm.core.runner.model.weight_bytes)
"""


def write_shards(folder: Path, kind: str) -> int:
    """A file for each layer, all with the same matrices; return all their bytes."""
    generator = torch.Generator().manual_seed(0)
    matrices = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    written = {
        name: WRITERS[kind](weight)[0] if kind in WRITERS else {".weight": weight.bfloat16()}
        for name, weight in matrices.items()
    }
    ends = {"model.embed_tokens.weight": (512, HIDDEN), "lm_head.weight": (512, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shards = [{name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in ends.items()}]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors = {
            f"{prefix}{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        for name, parts in written.items():
            tensors |= {f"{prefix}{name}{ending}": tensor.contiguous() for ending, tensor in parts.items()}
        shards.append(tensors)
    places = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    more = {"quantization_config": CONFIGS[kind]} if kind in CONFIGS else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | more))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["bfloat16", *(kind for kind in WRITERS if kind != "hqq rows")])
def test_loading_takes_the_weights_once(kind: str, stories_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (stories_dir / name).exists():
            (tmp_path / name).write_bytes((stories_dir / name).read_bytes())
    file_bytes = write_shards(tmp_path, kind)
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    peak, kept, packed = map(int, found.stdout.split()[-3:])
    whole = max(file_bytes, packed)  # groups of 32 columns take more in memory than in some files
    largest = 4 * WIDE * HIDDEN * 4  # a few copies of one matrix in float32 while it is packed
    print(f"{kind}: file {file_bytes / 1e6:.0f} MB, kept {kept / file_bytes:.3f}, peak {peak / file_bytes:.3f}")
    assert kept < 1.25 * whole + (64 << 20), (kept, file_bytes, packed)
    assert peak < 1.25 * whole + largest + (64 << 20), (peak, file_bytes, packed)
    assert peak < 2 * whole
