"""Check the options of `ingot bench` before anything is loaded."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ingot.ir.errors import ArtifactError, OptionError, OutputError

if TYPE_CHECKING:
    from ingot.runtime.loading.artifact import Artifact

JsonFile = Annotated[str | None, Parameter(allow_leading_hyphen=True)]  # for "-"


def at_least(least: int, **options: int | None) -> None:
    """Raise OptionError if one of the options is below `least`. None is allowed.

    Options are keyword arguments, so that the error can name them.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise _refused(name, value, f"{least} or more")


def positive(**options: float) -> None:
    """Raise OptionError if one of the options is not a number above 0. Infinity is allowed.

    Options are keyword arguments, so that the error can name them.
    """
    for name, value in options.items():
        if math.isnan(value) or value <= 0:
            raise _refused(name, f"{value:g}", "a number above 0")


def at_most(most: int, artifact: "Artifact", what: str, **options: int) -> None:
    """Raise OptionError if the sum of the options exceeds `most`, a limit that the artifact was compiled for.

    Options are keyword arguments, so that the error can name them. `what` is the name of the limit in the error, such
    as "tokens of a sequence".
    """
    if sum(options.values()) > most:
        asked = " and ".join(f"{_flag(name)} {value}" for name, value in options.items() if value)
        raise OptionError(
            f"{asked}: too much for {artifact.manifest.name}",
            expected=f"at most {most}, the {what} that it was compiled for",
        )


def limit(artifact: "Artifact", name: str) -> int:
    """Return a limit that the artifact was compiled for, such as "max_seq_len".

    Raises ArtifactError if the artifact's manifest lacks it.
    """
    value = artifact.manifest.model.get(name)
    if type(value) is not int or value < 1:
        raise ArtifactError(f"{name} is {value!r:.80}", where="manifest.json, model", expected="a whole number above 0")
    return value


def check_file(json: str | None) -> None:
    """Raise OutputError if the option --json names a file that cannot be written. "-" is allowed, and means stdout.

    Commands call this before they measure, so that no measurement is lost.
    """
    if json in (None, "-"):
        return
    path = Path(str(json))
    if path.is_dir() or not path.parent.is_dir() or path.name.startswith("-"):
        raise OutputError(f"{path} cannot be written", where="--json", expected="a file in a folder that exists, or -")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refused(name: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{_flag(name)} is {value}", expected=expected)
