"""Read a tuning log from an artifact or a file of its own, and make the one that an artifact stores."""

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
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.variants import fat_targets, variant_folder

_OPTION = "--tuning-log"
LACKS = "the given log has none"


def read_log(given: str | Path | Mapping[str, Any], target: Target) -> TuningLog:
    """Return the tuning log that the user gave: tile sizes and backends of calls, from an earlier compile.

    `given` is the path of the log's file, the path of an artifact, or the log's JSON values. Raises OptionError if it
    is no log, and TargetError if it is for another target.
    """
    where, log = _read(given, target.name)
    if log.target != target.name:
        raise TargetError(
            f"the tuning log is for {log.target}, and this compile for {target.name}",
            where=where,
            expected=f"a log of a compile for {target.name}",
        )
    return log


def log_target(given: str | Path | Mapping[str, Any], targets: Sequence[str]) -> str:
    """Return the target of a tuning log that the user gave. `read_log` describes `given`.

    If it is a fat artifact, it has a log for several targets, and the result is the first of `targets` that it has.
    Raises OptionError if it is no log.
    """
    known = fat_targets(Path(given)) if isinstance(given, str | Path) else []
    return next((name for name in targets if name in known), "") if known else _read(given, "")[1].target


def _read(given: str | Path | Mapping[str, Any], target: str) -> tuple[str, TuningLog]:
    """Return where a tuning log comes from, for messages, and the log. `target` selects the variant of a fat
    artifact."""
    value: object = given
    where = "tuning_log"
    if isinstance(given, str | Path):
        where, path = str(given), Path(given)
        if target in fat_targets(path):
            path = variant_folder(path, target)
        value = _parsed(path / TUNING if path.is_dir() else path)
    try:
        return where, TuningLog.model_validate_json(json.dumps(value))
    except (ValidationError, TypeError) as error:
        raise OptionError(f"the tuning log is malformed: {_first(error)}", where=where, expected=_EXPECTED) from None


_EXPECTED = f"an artifact that has a {TUNING}, or that file"


def artifact_log(artifact: Artifact, target: Target) -> TuningLog | None:
    """Return the tuning log of an artifact: the tile sizes and backends that it was compiled with.

    Return None if it has no log. Raises ArtifactError if the log cannot be read.
    """
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
    """Return the tuning log that an artifact stores: the tile sizes and the timed calls of its compile.

    Each kernel's problem (sizes and dtypes of its call) and each call is listed once, in a fixed order.
    """
    tiles, backends = {one.key: one for one in choices}, {one.key: one for one in calls}
    return TuningLog(
        target=target.name,
        cores=target.cores,
        choices=tuple(tiles[key] for key in sorted(tiles)),
        calls=tuple(backends[key] for key in sorted(backends)),
    )


def with_reasons(choices: Sequence[Choice], log: TuningLog | None) -> tuple[Choice, ...]:
    """Return the tile sizes, with a `reason` for those that the given tuning log `log` lacks.

    The reason says that the log lacks them. Without a log, they are returned unchanged.
    """
    known = frozenset(choice.key for choice in log.choices) if log is not None else None
    return tuple(
        choice if known is None or choice.key in known else choice.model_copy(update={"reason": LACKS})
        for choice in choices
    )
