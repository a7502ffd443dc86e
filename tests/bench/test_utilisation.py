from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmill.arch.cost import decode_flops, prefill_flops
from tokenmill.arch.read import read_spec
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.utilisation import utilisation
from tokenmill.errors import InvalidConfig

CONFIG = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip


def test_one_request_alone_is_what_the_roofline_says(tmp_path: Path) -> None:
    """Decoding at 5 ms a token alone reads 16 GB of weights less the embedding per 5 ms."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    times = [n * 0.005 for n in range(1000)]
    record = BenchRecord(times_s=times, end_s=5.0, output_tokens=1000, input_tokens=10, status=200)
    found = utilisation([record], file, "H200")
    spec = read_spec(file)
    assert found["mbu"] == pytest.approx(15.01e9 / 0.005 / 4.8e12, rel=0.01)
    flops = prefill_flops(spec, 10) + 1000 * decode_flops(spec, 510)
    assert found["mfu"] == pytest.approx(flops / 5 / 989.4e12, rel=0.001)
    with pytest.raises(InvalidConfig, match="no device"):
        utilisation([record], file, "H1")
