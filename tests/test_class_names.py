"""A class name stands once in a room, so that a reader who meets it knows which class is meant."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("ir", "passes", "backends", "models", "runtime", "frontend")


def rooms() -> dict[str, list[Path]]:
    """The files of each room, those of nested folders included. Each folder of `ingot` is one, and so are the modules
    beside them together."""
    found = {name: sorted((ROOT / name).rglob("*.py")) for name in ROOMS}
    front = sorted(
        path
        for path in (ROOT / "ingot").iterdir()
        if path.is_dir() and not path.is_symlink() and path.name != "__pycache__"
    )
    found |= {f"ingot/{path.name}": sorted(path.rglob("*.py")) for path in front}
    return found | {"ingot": sorted((ROOT / "ingot").glob("*.py"))}


def names_of(source: str) -> Iterator[tuple[str, bool]]:
    """The public classes of a module, nested ones included, and the aliases of types beside them; whether it is a
    class."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, True
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield target.id, False


def repeated(sources: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """The names of classes that stand for something else too, each with the files that have it."""
    places: dict[str, list[str]] = defaultdict(list)
    classes: set[str] = set()
    for path, source in sources.items():
        for name, is_class in names_of(source):
            places[name].append(path)
            if is_class:
                classes.add(name)
    return {name: paths for name, paths in sorted(places.items()) if name in classes and len(paths) > 1}


def test_a_class_name_stands_once_in_a_room() -> None:
    files = rooms()
    assert all(files.values()), "a room without files is not looked at"
    found = {
        room: twice
        for room, paths in files.items()
        if (twice := repeated({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}))
    }
    assert not found, "rename by meaning; one name is one thing in a room"


def test_what_counts_as_a_repeated_name() -> None:
    assert repeated({"a.py": "class Step: ...", "b/c.py": "class Step: ..."}) == {"Step": ["a.py", "b/c.py"]}
    assert repeated({"a.py": "class Step: ...", "b.py": "Step = int | str"}) == {"Step": ["a.py", "b.py"]}
    assert repeated({"a.py": "class Outer:\n    class Step: ...", "b.py": "class Step: ..."}).keys() == {"Step"}
    assert not repeated({"a.py": "class _Step: ...", "b.py": "class _Step: ..."})
    assert not repeated({"a.py": "Read = int", "b.py": "Read = int"})
