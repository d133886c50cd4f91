"""Print the weights of an artifact: types, files and recipes."""

import re
from typing import Any

from ingot.cli.console import console, print_table, size_text, table
from ingot.cli.views.filter import NO_FILTER, Filter
from ingot.cli.views.lines import read_programs
from ingot.cli.views.programs import FINAL
from ingot.ir.errors import ArtifactError, OptionError
from ingot.runtime.loading.artifact import Artifact

_BYTES_PER_ELEMENT = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2}  # the others have one


def weights_json(artifact: Artifact, wanted: Filter) -> dict[str, Any]:
    """Return the content of weights.json. With a filter, return only the matching weights.

    A weight matches by its name, its layers, and the ops that read it. Raises OptionError if none match.
    """
    index: Any = artifact.read_json("weights.json")
    if not isinstance(index, dict):
        raise ArtifactError("weights.json is malformed: it is not an object", where=str(artifact.folder))
    if not wanted:
        return index
    programs = read_programs(artifact.read_text(FINAL))
    wanted.check(programs)
    asked = {
        line.name
        for program in programs
        for line in program.lines
        if line.kind == "param" and wanted.holds(line.name, program.readers(line.name), line.layers)
    }
    left = {name: entry for name, entry in index.items() if name in asked}
    if not left:
        raise OptionError("no weight matches", where=str(wanted), expected="one that matches all that is given")
    return left


def print_weights(artifact: Artifact, wanted: Filter = NO_FILTER) -> None:
    """Print a table of the weights that match the filter: type, size, place in the artifact's files, and recipe.

    A recipe says how the weight is made from checkpoint tensors.
    """
    rows, total = [], 0
    shown: dict[str, str] = {}
    try:
        for name, entry in weights_json(artifact, wanted).items():
            size = _BYTES_PER_ELEMENT.get(entry["dtype"], 1)
            for extent in entry["shape"]:
                size *= extent
            if "same_as" in entry:
                place = f"same as {entry['same_as']}"
            elif "parts" in entry:
                place = ", ".join(f"{part['file']}@{part['offset']}" for part in entry["parts"])
                total += size * len(entry["parts"])
            else:
                place, total = f"{entry['file']}@{entry['offset']}", total + size
            recipe = _recipe_text(name, entry["recipe"], shown)
            rows.append((name, entry["dtype"], entry["shape"], size_text(size), place, recipe))
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"weights.json is malformed: {error!r}", where=str(artifact.folder)) from error
    out = console()
    print_table(out, table(("param", "dtype", "shape", "size>", "file@offset", "recipe"), rows))
    out.print(f"\n{len(rows)} params, {size_text(total)} resident", markup=False)


_OUTPUT = re.compile(r"(?<=\))\.(\w+)")


def _recipe_text(name: str, recipe: str, shown: dict[str, str]) -> str:
    """Return the text of a param's recipe: the steps that make the param from checkpoint tensors.

    `name` is the name of the param, and `recipe` its recipe. Some steps have several results, for several params. Their
    text is printed for the first of these params only. For the other params, the text names the result and the first
    param. `shown` maps the steps printed so far to their first param. New steps are added to it.
    """
    steps, results = _OUTPUT.sub("", recipe), dict.fromkeys(_OUTPUT.findall(recipe))
    first = shown.setdefault(steps, name)
    return recipe if first == name or not results else f"{', '.join(results)} of the recipe of {first}"
