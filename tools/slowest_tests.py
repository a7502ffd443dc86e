"""The 30 slowest tests of several runs.   python tools/slowest_tests.py FOLDER_OF_JUNIT_FILES"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

COUNT = 30


def main(folder: Path) -> None:
    cases = [case for path in folder.glob("*.xml") for case in ElementTree.parse(path).iter("testcase")]
    slowest = sorted(cases, key=lambda case: float(case.get("time", 0)), reverse=True)[:COUNT]
    print(f"the {len(slowest)} slowest of {len(cases)} tests, in seconds")
    for case in slowest:
        print(f"{float(case.get('time', 0)):8.2f}  {case.get('classname')}::{case.get('name')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
