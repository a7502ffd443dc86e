"""`tokenmill tune`: measure the thresholds for kernel selection on this machine's GPU."""

from __future__ import annotations

from pathlib import Path

from tokenmill.errors import InvalidConfig


def command(*, output: Path | None = None) -> int:
    """Measure the thresholds for kernel selection on this machine's GPU and store them. Takes a few minutes, during
    which the GPU should be idle.

    Parameters
    ----------
    output
        Output file; by default tuning.toml in the model store, which every start on this machine reads.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise InvalidConfig("tune needs an NVIDIA GPU, and torch finds none")
    from tokenmill.ops.triton.launch.capabilities import measured_tunings, tuning_path
    from tokenmill.ops.triton.tune import format_row, measure

    path = tuning_path() if output is None else output
    others = [row for row in measured_tunings(path) if row.name != torch.cuda.get_device_name()]
    row = measure(torch.device("cuda", torch.cuda.current_device()), lambda line: print(line, flush=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(format_row, (row, *others))), encoding="utf-8")
    print(f"wrote {path}")
    return 0
