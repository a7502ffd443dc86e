"""`tokenmill completion`: a script with which a shell completes commands and flags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from tokenmill.errors import InvalidConfig

SHELLS = ("bash", "zsh", "fish")


def command(shell: Literal["bash", "zsh", "fish"] | None = None, /) -> int:
    """Print a script that lets your shell complete commands and flags: source <(tokenmill completion bash)

    Parameters
    ----------
    shell
        The shell; the one you use by default.
    """
    from tokenmill.cli.dispatch import whole_app

    chosen = shell or Path(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise InvalidConfig(f"name a shell: {', '.join(SHELLS)}", param="shell")
    print(whole_app().generate_completion(prog_name="tokenmill", shell=chosen))  # type: ignore[arg-type]
    return 0
