"""Writes docs/COMBINATIONS.md from the engine's behaviour:   python -m tests.support.write_combinations [MODEL]

It runs every pair of features and records whether it works or how it is refused. The tests run the same pairs and
compare.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.combination_features import FEATURES
from tests.support.combination_pairs import PAIRS, Pair, PairVerdict, TrialEngines, verdict

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "COMBINATIONS.md"
STORIES = ROOT.parent / "shared" / "goldens" / "stories260K" / "hf"
HEAD = """# What combines with what

Made by `python -m tests.support.write_combinations`, which runs every pair on a small trained model; a test runs them
again and compares. **yes**: each of the two does what it does alone, and the answer is the same in a batch of other
requests. **400**: refused, with the message below.
"""


def table(verdicts: dict[Pair, PairVerdict]) -> str:
    names = [feature.name for feature in FEATURES]
    lines = ["| |" + "".join(f" {name} |" for name in names[1:]), "|---|" + "---|" * (len(names) - 1)]
    for number, row in enumerate(names[:-1]):
        cells = [_cell(verdicts, row, column) if number < place else "" for place, column in enumerate(names[1:], 1)]
        lines.append(f"| **{row}** |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(lines)


def _cell(verdicts: dict[Pair, PairVerdict], row: str, column: str) -> str:
    return "yes" if verdicts[row, column].refusal is None else "400"


def page(verdicts: dict[Pair, PairVerdict]) -> str:
    refusals = [f"| {a}, {b} | {v.refusal} |" for (a, b), v in verdicts.items() if v.refusal is not None]
    return "\n".join([HEAD, table(verdicts), "", "| refused | message |", "|---|---|", *refusals, ""])


def main(arguments: list[str]) -> int:
    bench = TrialEngines(Path(arguments[0]) if arguments else STORIES)
    TABLE.write_text(page({names: verdict(bench, names) for names in PAIRS}), encoding="utf-8")
    print(f"{TABLE}: {len(PAIRS)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
