"""The command line. This file imports no command, so that `tokenmill --help` and `--version` are quick.

    main ─► cli/dispatch: flags, TOML file, environment ─► the command's function ─► cli/exit_codes

Exit codes: 0 success, 1 failure (one line on stderr), 2 wrong usage (one line), 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import sys

from tokenmill.cli.exit_codes import exit_code_of
from tokenmill.cli.verbs import VERBS

__all__ = ["VERBS", "main"]


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: _run_verb(arguments))


def _run_verb(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and arguments[1:2] and arguments[1] in VERBS:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    verb = arguments[0]
    if verb in ("--version", "-V", "version"):
        import tokenmill

        print(f"tokenmill {tokenmill.__version__}")
        return 0
    if verb not in VERBS:
        print(f"tokenmill: {_unknown(verb)}", file=sys.stderr)
        return 2
    if verb in ("serve", "up"):
        from tokenmill.server.early_stop import EARLY_STOP

        EARLY_STOP.install()
    from tokenmill.engine.startup.core_prestart import prestart_core

    with prestart_core(verb, arguments[1:]):
        from tokenmill.cli.dispatch import dispatch

        return dispatch(verb, arguments[1:])


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {line}" for verb, line in VERBS.items())
    return f"""\
Tokenmill: run and serve language models on CPUs and GPUs.

Usage: tokenmill COMMAND [ARGUMENTS]

{verbs}

Try:
  tokenmill run "What is the capital of France?"
  tokenmill serve

MODEL is a short name (tokenmill list --catalog), a GGUF file, a model directory or a Hugging Face id.
Every flag can also be set in a file (--config FILE.toml, or TOKENMILL_CONFIG) and in the environment:
--max-context 4096 is TOKENMILL_MAX_CONTEXT=4096. `tokenmill COMMAND --help` lists a command's flags."""


def _unknown(verb: str) -> str:
    if verb.startswith("-"):
        return f"{verb} must follow a command; see tokenmill --help"
    import difflib

    near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.6)
    return f"unknown command {verb!r}" + (f"; did you mean {near[0]}?" if near else "; see tokenmill --help")
