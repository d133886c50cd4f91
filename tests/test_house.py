"""Where modules stand: few beside the folders, each folder with a line on what belongs there, no circle of imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("ir", "models", "frontend", "passes", "backends", "runtime")
# Programs can be compared by a method of theirs, and comparing needs programs.
IN_DIFF = "ingot.ir.diff"


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of `ingot` by its name."""
    files = [*(ROOT / "ingot").rglob("*.py"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]
    found = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[:2] in {("ingot", room) for room in ROOMS}:  # reached through a link, where the walk follows it
            continue
        name = ".".join(parts if parts[0] == "ingot" else ("ingot", *parts))
        found[name.removesuffix(".__init__")] = file
    return found


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(tree: ast.AST, known: Mapping[str, object], *, later: bool) -> Iterator[str]:
    """The modules of `known` that a module names in its imports, once each or more.

    An import counts wherever it stands; without `later`, only those that run when the module is imported: none in a
    function, none under TYPE_CHECKING. `from a import b` names a.b where that is a module, else a. That importing a.b
    runs a/__init__.py does not count: all files of a folder would depend on it.
    """
    for node in ast.iter_child_nodes(tree):
        if not later and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            continue
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                inner = f"{node.module}.{one.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else node.module
        yield from imported(node, known, later=later)


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """A chain of modules of which each imports the next, and the last the first; empty where there is none."""
    done: set[str] = set()

    def follow(name: str, chain: list[str]) -> list[str]:
        if name in chain:
            return [*chain[chain.index(name) :], name]
        if name in done:
            return []
        for other in sorted(imports.get(name, ())):
            if found := follow(other, [*chain, name]):
                return found
        done.add(name)
        return []

    for name in sorted(imports):
        if found := follow(name, []):
            return found
    return []


def table(*, later: bool) -> dict[str, set[str]]:
    known = modules()
    assert len(known) > 500
    return {name: set(imported(parsed(file), known, later=later)) - {name} for name, file in known.items()}


def test_no_circle_when_modules_are_imported() -> None:
    assert circle(table(later=False)) == []


def test_no_circle_by_any_import_but_those_of_diff() -> None:
    """An import in a function hides a circle, and does not break it."""
    found = {
        name: {other for other in others if not other.startswith(IN_DIFF)}
        for name, others in table(later=True).items()
        if not name.startswith(IN_DIFF)
    }
    assert circle(found) == []


IN_FUNCTION = "def f():\n    from ingot import b\n"
FOR_TYPES = "if TYPE_CHECKING:\n    from ingot.b import B\n"


@pytest.mark.parametrize(
    ("text", "runs", "counts"),
    [
        ("import ingot.b", {"ingot.b"}, {"ingot.b"}),
        ("from ingot import b, c", {"ingot", "ingot.b"}, {"ingot", "ingot.b"}),
        ("from ingot.b import f", {"ingot.b"}, {"ingot.b"}),
        (IN_FUNCTION, set(), {"ingot.b"}),
        (FOR_TYPES, set(), {"ingot.b"}),
        (f"class A:\n    {IN_FUNCTION.replace(chr(10), chr(10) + '    ')}", set(), {"ingot.b"}),
    ],
)
def test_which_imports_count(text: str, runs: set[str], counts: set[str]) -> None:
    known = {"ingot": 0, "ingot.b": 0}
    assert set(imported(ast.parse(text), known, later=False)) == runs
    assert set(imported(ast.parse(text), known, later=True)) == counts


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b", "c"}, "b": {"d"}, "c": {"a"}, "d": set()}) == ["a", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


@pytest.mark.parametrize(("folder", "most"), [("ingot", 10), ("ir", 30)])
def test_few_modules_stand_beside_the_folders(folder: str, most: int) -> None:
    """What does not fit here belongs in one of the folders."""
    assert len(list((ROOT / folder).glob("*.py"))) <= most


def test_each_folder_says_what_belongs_there() -> None:
    folders = {name: file for name, file in modules().items() if file.name == "__init__.py"}
    assert {"ingot.compile", "ingot.ir.artifact"} <= folders.keys()
    silent = {n for n, file in folders.items() if not ast.get_docstring(parsed(file))}
    assert silent == set()
