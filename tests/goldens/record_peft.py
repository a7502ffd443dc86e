"""Record what PEFT computes with adapters of random numbers on the tiny trained models.

    python tests/goldens/record_peft.py SHARED/goldens tests/goldens/peft.json          (needs peft and transformers)

Each case is an adapter's config, the names and shapes of its tensors, and some logits of a prompt in float32.
`tests/lora/test_against_peft.py` makes the same adapters (`tests/support/random_adapters.py`) and compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.random_adapters import SAVED_BASE, random_tensor

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PROMPT = [1, 403, 407, 261, 378, 31, 290, 44, 17, 300, 271, 5]
EVERY = 16  # so many logits apart are kept
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("rank 1", "stories", {"r": 1, "lora_alpha": 1, "target_modules": ALL}),
    ("rank 8", "stories", {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
    ("rank 64", "stories", {"r": 64, "lora_alpha": 16, "target_modules": ALL}),
    ("rank 256", "stories", {"r": 256, "lora_alpha": 16, "target_modules": ALL}),
    ("rank stabilised", "stories", {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": ALL}),
    ("DoRA", "stories", {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": ALL}),
    (
        "patterns",
        "stories",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, r"layers\.[13]\.mlp\.up_proj": 12, "model.layers.4.self_attn.o_proj": 16},
            "alpha_pattern": {"v_proj": 3, r".*\.0\..*": 20},
        },
    ),
    (
        "DoRA with patterns, rank stabilised",
        "stories",
        {
            "r": 4,
            "lora_alpha": 4,
            "use_dora": True,
            "use_rslora": True,
            "target_modules": ATTENTION,
            "rank_pattern": {"k_proj": 9},
        },
    ),
    ("a regular expression", "stories", {"r": 4, "lora_alpha": 8, "target_modules": r".*\.[024]\..*\.(q|gate)_proj"}),
    ("some layers", "stories", {"r": 4, "lora_alpha": 8, "target_modules": ALL, "layers_to_transform": [1, 3]}),
    ("embedding", "stories", {"r": 8, "lora_alpha": 16, "target_modules": ["embed_tokens", "q_proj"]}),
    ("head", "stories", {"r": 8, "lora_alpha": 16, "target_modules": ["lm_head", "down_proj"]}),
    ("embedding and head", "stories", {"r": 3, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head", *ALL]}),
    ("experts", "tiny/qwen3_moe", {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "target_parameters": EXPERTS}),
    (
        "gates and ups",
        "tiny/mixtral",
        {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "target_parameters": EXPERTS[:1]},
    ),
    (
        "downs and router",
        "tiny/mixtral",
        {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": [EXPERTS[1], "mlp.gate.weight"]},
    ),
    (
        "experts, woven",
        "tiny/gpt_oss",
        {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "target_parameters": EXPERTS},
    ),
    (
        "latent attention",
        "tiny/deepseek_v3",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
            "exclude_modules": r".*experts\..*",
        },
    ),
    (
        "fused rows",
        "tiny/qwen3_next",
        {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
    (
        "split rows",
        "tiny/qwen3_5",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [*ALL, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"],
        },
    ),
    ("Mamba", "tiny/granitemoehybrid", {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "q_proj"]}),
    (
        "short convolution",
        "tiny/lfm2",
        {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "w1", "w2", "w3", "q_proj"]},
    ),
    ("scaled embedding", "tiny/gemma4", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", *ALL]}),
]


def record(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", **settings)).save_pretrained(place)
        file = Path(place) / "adapter_model.safetensors"
        tensors = load_file(file)
        trained = {name: random_tensor(name, list(t.shape)) for name, t in tensors.items() if SAVED_BASE not in name}
        save_file({**tensors, **trained}, file)
        model = PeftModel.from_pretrained(base(), place).eval()
        config = json.loads((Path(place) / "adapter_config.json").read_text())
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0]
    return {
        "config": {**config, "base_model_name_or_path": folder.name},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items() if name in trained},
        "saved": sorted(tensors.keys() - trained.keys()),
        "logits": [[round(x, 5) for x in row] for row in logits[:, ::EVERY].tolist()],
    }


if __name__ == "__main__":
    goldens, out = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {"prompt": PROMPT, "every": EVERY, "cases": {}}
    for title, name, settings in CASES:
        folder = goldens / "stories260K" / "hf" if name == "stories" else goldens / name
        found["cases"][title] = {"model": name, **record(folder, settings)}
        print(title, len(found["cases"][title]["shapes"]), found["cases"][title]["saved"])
    out.write_text(json.dumps(found, separators=(",", ":")))
