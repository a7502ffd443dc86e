"""Check the structure of the code and print its sizes.   python tools/check_house.py [--quiet]

Faults, each of which makes the exit code 1:

- a class name that is used twice in the package, its tests, benchmarks, tools and examples;
- an import cycle, counting imports inside functions and under TYPE_CHECKING;
- an import that goes up the layers or between neighbours (the layers are those of import-linter in pyproject.toml), and
  a top-level package that has no layer;
- a broad `except` (bare, `Exception` or `BaseException`, `contextlib.suppress` of them) that the table of
  docs/ARCHITECTURE.md does not list, or a row of that table without such an `except`;
- a docstring whose first sentence has no subject of its own ("Of a step: …", "Or nothing.", "Whose tile it is"), in
  the same folders;
- two test files of one name, which pytest does not collect together.

Sizes and numbers of parameters are hints, not limits.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tokenmill"
TESTS = ROOT / "tests"
OTHER_FOLDERS = ("tests", "benchmarks", "tools", "examples")  # held to the rules on class names and docstrings too
BROAD = {"Exception", "BaseException"}
WITHOUT_LAYER = {"__main__", "testing", "version"}  # beside the layers: the entry point, models for tests, a constant
NO_SUBJECT = re.compile(
    r"(Of|Or|Nor|And|But|They|Them|Their|It|Its|He|His|Whose|Whoever|Who|Whom|Whether|Which|Nobody|In every place)\b"
)
BROAD_TABLE = "Where any exception is caught"


@dataclass(frozen=True)
class ParsedModule:
    """One parsed source file; `name` is dotted and begins with the top-level folder."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def file(self) -> str:
        """Path as documents write it: inside the package (`engine/core.py`), or else from the root
        (`tests/conftest.py`)."""
        is_package = self.path.is_relative_to(ROOT / PACKAGE)
        return self.path.relative_to(ROOT / PACKAGE if is_package else ROOT).as_posix()

    @property
    def room(self) -> str:
        """Top-level package or module that this one belongs to; empty for the package itself."""
        return self.name.split(".")[1] if "." in self.name else ""


def read_modules(folder: str) -> dict[str, ParsedModule]:
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ParsedModule(name, path, ast.parse(text), text.count("\n"))
    return found


def imports_of(module: ParsedModule, modules: dict[str, ParsedModule]) -> set[str]:
    """Modules of the package that this one imports anywhere: on top, in functions, under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.file}:{node.lineno}: relative imports are not used here"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = members & modules.keys()
            found.update(submodules)
            if members - submodules and node.module:  # a name that the module itself defines
                found.add(node.module)
    return (found & modules.keys()) - {module.name, PACKAGE}


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected parts of more than one module (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        order[node] = lowest[node] = len(order)
        open_nodes.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                yield from visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in open_nodes:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            start = open_nodes.index(node)
            part = open_nodes[start:]
            del open_nodes[start:]
            if len(part) > 1:
                yield sorted(part)

    for node in graph:
        if node not in order:
            yield from visit(node)


def cycle_faults(modules: dict[str, ParsedModule]) -> Iterator[str]:
    graph = {name: imports_of(module, modules) for name, module in modules.items()}
    for part in cycles(graph):
        yield "import cycle: " + ", ".join(part)


def layer_faults(modules: dict[str, ParsedModule]) -> Iterator[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    level = {
        room.strip(" ()").removeprefix(f"{PACKAGE}."): len(layers) - number
        for number, layer in enumerate(layers)
        for room in re.split(r"[|:]", layer)
    }
    for room in sorted({module.room for module in modules.values()} - level.keys() - WITHOUT_LAYER - {""}):
        yield f"no layer in pyproject.toml: {PACKAGE}.{room}"
    for module in modules.values():
        for target in sorted(imports_of(module, modules)):
            room = modules[target].room
            if room == module.room or module.room not in level:
                continue
            if level.get(room, 0) >= level[module.room] or room in {"testing", "__main__"}:
                yield f"import goes up: {module.name} imports {target}"


def class_faults(modules: dict[str, ParsedModule]) -> Iterator[str]:
    places = defaultdict(list)
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.file}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"class name used {len(where)} times: {name} ({', '.join(where)})"


def is_broad(node: ast.AST) -> bool:
    if isinstance(node, ast.ExceptHandler):
        return node.type is None or _names_broad([node.type])
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and _names_broad(node.args)


def _names_broad(caught: list[ast.expr]) -> bool:
    parts = [part for one in caught for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return any(isinstance(part, ast.Name) and part.id in BROAD for part in parts)


def listed_broad_excepts() -> Counter[str]:
    """Files in the first column of ARCHITECTURE's table, one row for each `except`."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition(BROAD_TABLE)[2]
    rows = re.match(r"[^|]*((?:\|.*\n)*)", section)
    return Counter(re.findall(r"^\| `([\w/]+\.py)`", rows[1] if rows else "", flags=re.MULTILINE))


def except_faults(modules: dict[str, ParsedModule]) -> Iterator[str]:
    listed = listed_broad_excepts()
    for module in modules.values():
        lines = sorted(getattr(node, "lineno", 0) for node in ast.walk(module.tree) if is_broad(node))
        num_listed = listed.pop(module.file, 0)
        if len(lines) != num_listed:
            places = f" (lines {', '.join(map(str, lines))})" if lines else ""
            yield f"broad excepts: {module.file} has {len(lines)}{places}, docs/ARCHITECTURE.md lists {num_listed}"
    for file in listed:
        yield f"broad excepts: docs/ARCHITECTURE.md lists {file}, which does not exist"


def docstring_faults(modules: dict[str, ParsedModule]) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, documented) and NO_SUBJECT.match(text := ast.get_docstring(node) or ""):
                first = text.splitlines()[0][:70]
                yield f"docstring without a subject: {module.file}:{getattr(node, 'lineno', 1)}: {first}"


def test_name_faults(_modules: dict[str, ParsedModule]) -> Iterator[str]:
    """Test files of one name that pytest would collect in one run. The interpreted ones have a run of their own."""
    paths = [path for path in sorted(TESTS.rglob("test_*.py")) if "triton_interpreted" not in path.parts]
    for name, count in Counter(path.name for path in paths).items():
        if count > 1:
            yield f"{count} test files are called {name}"


def print_sizes(modules: dict[str, ParsedModule]) -> None:
    functions, classes, parameters = [], [], []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{module.file} {node.name}"
                functions.append((_length(node), where))
                arguments = node.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                parameters.append((count, where))
            elif isinstance(node, ast.ClassDef):
                classes.append((_length(node), f"{module.file} {node.name}"))
    files = [(module.num_lines, module.file) for module in modules.values()]
    lengths = sorted(length for length, _ in functions)
    median, most = lengths[len(lengths) // 2], lengths[len(lengths) * 95 // 100]
    print(f"{len(files)} files, {sum(lines for lines, _ in files)} lines")
    print(f"lines of a function: median {median}, 95th percentile {most}, longest {lengths[-1]}")
    rooms: Counter[str] = Counter()
    for module in modules.values():
        rooms[module.room or PACKAGE] += module.num_lines
    print("lines: " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
    titles = ("longest files", "longest functions", "largest classes", "most parameters")
    for title, rows in zip(titles, (files, functions, classes, parameters), strict=True):
        print(f"{title}: " + ", ".join(f"{what} {size}" for size, what in sorted(rows, reverse=True)[:5]))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def main(arguments: list[str]) -> int:
    modules = read_modules(PACKAGE)
    everything = {**modules, **{name: one for folder in OTHER_FOLDERS for name, one in read_modules(folder).items()}}
    if "--quiet" not in arguments:
        print_sizes(modules)
    checks = (cycle_faults, layer_faults, except_faults, test_name_faults)
    faults = [fault for check in checks for fault in check(modules)]
    faults += [fault for check in (class_faults, docstring_faults) for fault in check(everything)]
    for fault in faults:
        print(fault)
    print(f"{len(faults)} structural faults" if faults else "no structural faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
