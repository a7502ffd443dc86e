"""What takes time in several runs of tests.

python tools/slowest_tests.py FOLDER_OF_JUNIT_FILES              the 30 slowest tests
python tools/slowest_tests.py FOLDER --files > tests/long_files.txt
                                 files that take seconds, the longest first: the order in which workers get them
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNT = 30
LONG_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", action="store_true")
    given = parser.parse_args()
    cases = [case for path in given.folder.glob("*.xml") for case in ElementTree.parse(path).iter("testcase")]
    print_files(cases) if given.files else print_tests(cases)


def print_tests(cases: list[ElementTree.Element]) -> None:
    slowest = sorted(cases, key=seconds, reverse=True)[:COUNT]
    print(f"the {len(slowest)} slowest of {len(cases)} tests, in seconds")
    for case in slowest:
        print(f"{seconds(case):8.2f}  {case.get('classname')}::{case.get('name')}")


def print_files(cases: list[ElementTree.Element]) -> None:
    total: Counter[str] = Counter()
    for case in cases:
        total[file_of(case)] += seconds(case)  # type: ignore[assignment]
    for file, taken in total.most_common():
        if taken >= LONG_S:
            print(f"{taken:6.0f} {file}")


def seconds(case: ElementTree.Element) -> float:
    return float(case.get("time", 0))


def file_of(case: ElementTree.Element) -> str:
    """The file of a test, whose class name is that of its module, and of a class in it if there is one."""
    parts = str(case.get("classname")).split(".")
    ends = range(len(parts), 0, -1)
    return next((file for end in ends if (ROOT / (file := "/".join(parts[:end]) + ".py")).is_file()), parts[0])


if __name__ == "__main__":
    main()
