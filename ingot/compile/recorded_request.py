"""Read the request that an artifact records, to compile it again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.compile.competing import backends_named, with_choices
from ingot.compile.request import Request
from ingot.compile.timing.tuning_log import artifact_log
from ingot.ir.artifact.manifest import REQUEST, TIMINGS
from ingot.ir.backend import Backend
from ingot.ir.errors import ArtifactError, CheckpointError, OptionError, UnknownPassError
from ingot.ir.json_text import parse_json
from ingot.runtime.loading.artifact import Artifact


def recorded_request(
    artifact: Artifact, checkpoint: str | Path | None = None, *, changes: Mapping[str, Any] | None = None
) -> Request:
    """Return the request that `artifact` was compiled from, to compile it again.

    `checkpoint` replaces the recorded checkpoint, for example if that has moved. `changes` are options to replace;
    with any, the request has the backends that they choose, and none of the artifact's tile sizes. Raises
    ArtifactError if the artifact does not record the request, and CheckpointError if the checkpoint is missing.
    """
    made: Any = artifact.read_json(REQUEST)
    if not isinstance(made, dict) or not isinstance(made.get("options"), dict):
        raise ArtifactError(f"{REQUEST} is malformed", where=str(artifact.folder))
    folder = checkpoint or _compiled_from(artifact)
    try:
        request = Request.read(folder, **{**made["options"], **(changes or {})})
    except UnknownPassError as error:
        raise ArtifactError(
            f"the artifact was compiled with the pass '{error.name}', which is not installed",
            where=str(artifact.folder),
            hint="install the package that brings it",
        ) from None
    except TypeError as error:
        raise ArtifactError(f"{REQUEST} is malformed: {error}", where=str(artifact.folder)) from None
    if changes:
        return request
    request = replace(request, backends=_same_backends(made, request), dropped={})
    # Use the choices that it was compiled with; do not measure again.
    log = artifact_log(artifact, request.target)
    if log is None:
        return request
    backends = tuple(with_choices(one, log.given()) for one in request.backends)
    return replace(request, backends=backends, decided=log.given_calls())


def _same_backends(made: Mapping[str, Any], request: Request) -> tuple[Backend, ...]:
    """Return the backends that the artifact of the recorded request `made` was compiled with.

    Installed packages may bring other backends now. Raises ArtifactError if one of the backends is missing.
    """
    try:
        names = made["identity"]["options"]["backends"]
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{REQUEST} is malformed: it has no backends") from error
    if names == [one.name for one in request.backends]:
        return request.backends
    try:
        return backends_named([str(name) for name in names], request.target.device)
    except OptionError as error:
        raise ArtifactError(
            f"the artifact was compiled with another backend: {error.what}", where=REQUEST, hint=error.hint
        ) from None


def _compiled_from(artifact: Artifact) -> str:
    """Return the folder of the checkpoint that an artifact was compiled from.

    If the folder is gone, return the checkpoint's name on the hub. Raises CheckpointError if it has none.
    """
    path = artifact.folder / TIMINGS
    timings: Any = parse_json(path.read_bytes()) if path.is_file() else {}
    folder = timings.get("checkpoint") if isinstance(timings, dict) else None
    if not isinstance(folder, str) or not Path(folder).is_dir():
        origin = timings.get("hub") if isinstance(timings, dict) else None
        if isinstance(origin, str):
            return origin
        raise CheckpointError(
            "the checkpoint that the artifact was compiled from is not there",
            where=str(folder or artifact.folder),
            hint="name its folder with --checkpoint",
        )
    return folder
