"""The tuning log as a file: read from an artifact or a file of its own, written into an artifact."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from ingot.ir.artifact.backend_times import BackendTimes
from ingot.ir.artifact.manifest import TUNING
from ingot.ir.artifact.tuning import Choice, TuningLog
from ingot.ir.errors import ArtifactError, OptionError, TargetError
from ingot.ir.json_text import parse_json
from ingot.ir.machine.target import Target
from ingot.runtime.artifact import Artifact

_OPTION = "--tuning-log"
LACKS = "the given log has none"


def read_log(given: str | Path | Mapping[str, Any], target: Target) -> TuningLog:
    """Return a log from the path of its file or of an artifact, or from JSON values. Raises OptionError if it is no
    log, and TargetError if it is for another target."""
    value: object = given
    where = "tuning_log"
    if isinstance(given, str | Path):
        where = str(given)
        value = _parsed(Path(given) / TUNING if Path(given).is_dir() else Path(given))
    try:
        log = TuningLog.model_validate_json(json.dumps(value))
    except (ValidationError, TypeError) as error:
        raise OptionError(f"the tuning log is malformed: {_first(error)}", where=where, expected=_EXPECTED) from None
    if log.target != target.name:
        raise TargetError(
            f"the tuning log is for {log.target}, and this compile for {target.name}",
            where=where,
            expected=f"a log of a compile for {target.name}",
        )
    return log


_EXPECTED = f"an artifact that has a {TUNING}, or that file"


def artifact_log(artifact: Artifact, target: Target) -> TuningLog | None:
    """Return the choices that an artifact was compiled with; None if it had none. Raises ArtifactError if the log
    cannot be read."""
    if all(entry.path != TUNING for entry in artifact.manifest.files):
        return None
    try:
        return read_log(cast("Mapping[str, Any]", artifact.read_json(TUNING)), target)
    except OptionError as error:
        raise ArtifactError(error.what, where=f"{artifact.folder}/{TUNING}") from None


def _parsed(file: Path) -> object:
    try:
        return parse_json(file.read_bytes())
    except OSError as error:
        reason = f"the tuning log cannot be read: {error.strerror}"
    except ValueError as error:
        reason = f"the tuning log is not JSON: {error}"
    raise OptionError(reason, where=str(file), expected=_EXPECTED)


def _first(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]


def log_of(choices: Iterable[Choice], calls: Iterable[BackendTimes], target: Target) -> TuningLog:
    """Return the log that an artifact stores: distinct choices and distinct calls, in a fixed order."""
    tiles, backends = {one.key: one for one in choices}, {one.key: one for one in calls}
    return TuningLog(
        target=target.name,
        cores=target.cores,
        choices=tuple(tiles[key] for key in sorted(tiles)),
        calls=tuple(backends[key] for key in sorted(backends)),
    )


def with_reasons(choices: Sequence[Choice], log: TuningLog | None) -> tuple[Choice, ...]:
    """Return the choices; those that the given log lacks say so in their reason."""
    known = frozenset(choice.key for choice in log.choices) if log is not None else None
    return tuple(
        choice if known is None or choice.key in known else choice.model_copy(update={"reason": LACKS})
        for choice in choices
    )
