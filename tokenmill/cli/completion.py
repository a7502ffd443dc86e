"""`tokenmill completion`: print a shell's completion script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from tokenmill.errors import InvalidConfig

SHELLS = ("bash", "zsh", "fish")


def command(shell: Literal["bash", "zsh", "fish"] | None = None, /) -> int:
    """Print a completion script for commands and flags: source <(tokenmill completion bash)

    Parameters
    ----------
    shell
        The shell; by default the one in use.
    """
    from tokenmill.cli.dispatch import whole_app

    chosen = shell or Path(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise InvalidConfig(f"the shell must be one of {', '.join(SHELLS)}", param="shell")
    print(whole_app().generate_completion(prog_name="tokenmill", shell=chosen))  # type: ignore[arg-type]
    return 0
