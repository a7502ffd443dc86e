"""`tokenmill tune`: measures by which numbers kernels are best chosen on the GPU of this machine."""

from __future__ import annotations

from pathlib import Path

from tokenmill.errors import InvalidConfig


def command(*, output: Path | None = None) -> int:
    """Measure the GPU of this machine and keep a row of tuning for it; takes a few minutes, during which the GPU should
    be idle.

    Parameters
    ----------
    output
        File to write the row to; by default tuning.toml in the store's folder, which every start on this machine reads.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise InvalidConfig("tune measures an NVIDIA GPU, and torch finds none here")
    from tokenmill.ops.triton.launch.capabilities import measured_tunings, tuning_path
    from tokenmill.ops.triton.tune import format_row, measure

    path = tuning_path() if output is None else output
    others = [row for row in measured_tunings(path) if row.name != torch.cuda.get_device_name()]
    row = measure(torch.device("cuda", torch.cuda.current_device()), lambda line: print(line, flush=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(format_row, (row, *others))), encoding="utf-8")
    print(f"wrote {path}")
    return 0
