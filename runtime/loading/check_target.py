"""The machine that serves, and the check that an artifact was compiled for such a machine."""

from ingot.ir.artifact.manifest import Manifest
from ingot.ir.errors import TargetError
from ingot.ir.machine.extras import installed_version, require
from ingot.ir.machine.target import VERSIONS, Target, first_difference


def this_machine(manifest: Manifest) -> Target:
    """Return the description of this machine: of its GPU if the artifact was compiled for one, else of its CPU. Raises
    TargetError if there is no GPU for such an artifact, or if the package for GPUs is not installed."""
    if manifest.target.get("device") != "cuda":
        return Target.detect("cpu")
    try:
        target = Target.detect("cuda")
    except TargetError as error:
        raise TargetError(
            f"the artifact was compiled for a GPU, {manifest.target.get('name')!s:.80}, and {error.what}",
            expected="a machine like the one it was compiled for",
            hint="compile it again with --target cpu, or run it on a machine with such a GPU",
        ) from None
    require("cuda.bindings", "cuda-bindings", "running on a GPU")
    return target


def check_target(manifest: Manifest) -> None:
    """Raise TargetError if an artifact was compiled for another machine or by other versions of packages. The error
    names the first property that differs."""
    target = this_machine(manifest)
    compiled = {name: list(value) if isinstance(value, tuple) else value for name, value in manifest.target.items()}
    packages = {name: wanted for name, wanted in manifest.versions.items() if name not in VERSIONS}
    versions = {name: wanted for name, wanted in manifest.versions.items() if name not in packages}
    if difference := first_difference({**compiled, "versions": versions}, target.identity(versions)):
        raise TargetError(
            f"the artifact was compiled for another target: {difference}",
            expected="a machine like the one it was compiled for",
            hint="compile it again on this machine",
        )
    for name, wanted in packages.items():
        if (found := installed_version(name)) != wanted:
            raise TargetError(
                f"the artifact's code is of the package {name} {wanted}, and "
                + (f"the version {found} is installed" if found else "it is not installed"),
                where="manifest.json, versions",
                hint=f"pip install '{name}=={wanted}', or compile the model again",
            )
