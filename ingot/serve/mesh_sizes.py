"""The options `tensor_parallel_size` and `pipeline_parallel_size`: the mesh that a model is compiled for or must have.

Importing this imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.ir.artifact.manifest_file import is_artifact, mesh_in
from ingot.ir.errors import OptionError
from ingot.ir.mesh import STAGES, check_mesh, mesh_text, parse_mesh
from ingot.runtime.params.given_numbers import as_integer

# The name of each option, and its axis of a mesh.
SIZES: Mapping[str, str] = {"pipeline_parallel_size": STAGES, "tensor_parallel_size": "tp"}


def with_mesh(model: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of compiling `model`, with the mesh of the two sizes in place of the sizes.

    None, or no size, means the size that an artifact has, and 1 for a checkpoint. Raises OptionError for a bad size,
    for sizes in addition to a mesh, and for an artifact of another mesh.
    """
    others = {name: value for name, value in options.items() if name not in SIZES}
    sizes = {name: options[name] for name in SIZES if options.get(name) is not None}
    for name, size in sizes.items():
        if as_integer(size) is None or size < 1:
            raise OptionError(f"{name} is {size!r:.80}", expected="an integer of at least 1")
    if not sizes:
        return others
    if others.get("mesh"):
        raise OptionError(f"{next(iter(sizes))} and a mesh", expected="one of the two")
    asked = {SIZES[name]: int(size) for name, size in sizes.items()}
    if not is_artifact(model):
        mesh = {axis: size for axis, size in asked.items() if size > 1}
        return {**others, "mesh": mesh} if mesh else others
    own = parse_mesh(mesh_in(Path(model)))
    for name, axis in SIZES.items():
        if axis in asked and asked[axis] != own.get(axis, 1):
            wanted = check_mesh({**own, **asked})
            given = f' --mesh "{mesh_text(wanted)}"' if wanted else ""
            raise OptionError(
                f"{name} is {asked[axis]}, and the artifact was compiled for {mesh_text(own) or 'one process'}",
                where=str(model),
                expected=f"{own.get(axis, 1)}",
                hint=f"compile the checkpoint again: compile-model CHECKPOINT -o NAME.ingot{given}",
            )
    return others
