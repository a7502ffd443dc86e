"""llama.cpp through its own `llama-batched-bench`, for those who built it themselves.

The binary loads the model anew for every measurement; its table times prompt and answer apart, without the loading:

    |    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
    |   128 |    128 |    4 |   1024 |    0.373 |  1373.96 |    6.878 |    74.44 |    7.251 |   141.23 |

Runs as a script (model, threads, binary); see the package's docstring for the protocol.
"""

from __future__ import annotations

import json
import subprocess
import sys

BATCH = 512  # tokens decoded at once, as in the peer that uses the library
COLUMNS = {"PP": "PP", "TG": "TG", "B": "B", "S_PP t/s": "prefill_tok_s", "S_TG t/s": "decode_tok_s"}


def arguments(model: str, threads: int, asked: dict[str, int]) -> list[str]:
    length, steps, count = asked["input_len"], asked["output_len"], asked["concurrency"]
    context = count * (length + steps + 16)
    sizes = {"-c": context, "-b": BATCH, "-ub": BATCH, "-npp": length, "-ntg": steps, "-npl": count}
    flags = {**sizes, "-t": threads, "-tb": threads, "-ngl": 0}
    return ["-m", model, *(str(part) for flag in flags.items() for part in flag)]


def figures(output: str, asked: dict[str, int]) -> dict[str, float]:
    """Return both speeds from the table's row for the requested shape."""
    titles: list[str] = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "S_TG t/s" in cells:
            titles = cells
        elif len(cells) == len(titles) and cells[0].isdigit():
            row = {COLUMNS[title]: float(cell) for title, cell in zip(titles, cells, strict=True) if title in COLUMNS}
            if (row["PP"], row["TG"], row["B"]) == (asked["input_len"], asked["output_len"], asked["concurrency"]):
                return {name: row[name] for name in ("prefill_tok_s", "decode_tok_s")}
    raise SystemExit("llama-batched-bench printed no row for what was asked")


def run(binary: str, model: str, threads: int, asked: dict[str, int]) -> dict[str, float]:
    done = subprocess.run([binary, *arguments(model, threads, asked)], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SystemExit(f"llama-batched-bench ended with exit code {done.returncode}: {last[0]}")
    return figures(done.stdout, asked)


def main() -> None:
    model, threads, binary = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    print(json.dumps({"ready": True, "version": "llama-batched-bench"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(binary, model, threads, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
