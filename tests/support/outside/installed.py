"""Packages as pip would leave them, for processes that are given their folder to import from."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def install(site: Path, package: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """What pip leaves of a package: its modules, and what it says of itself."""
    (site / package).mkdir(parents=True)
    for name, text in {"__init__": "", **modules}.items():
        (site / package / f"{name}.py").write_text(text)
    info = describe(site, package.replace("_", "-"), "1.0")
    groups = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in items.items()) for group, items in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def describe(site: Path, name: str, version: str) -> Path:
    """What tells the version of a package; returns the folder that it is in."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


def install_example(site: Path, package: str) -> None:
    """`install` of one of the packages in docs/examples."""
    project = tomllib.loads((EXAMPLES / package / "pyproject.toml").read_text())["project"]
    modules = {path.stem: path.read_text() for path in (EXAMPLES / package / package).glob("*.py")}
    install(site, package, project["entry-points"], **modules)
