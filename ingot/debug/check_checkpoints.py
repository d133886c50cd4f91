"""Check the rounding of several checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.cli.progress import OnProgress, no_progress
from ingot.compile.request import Request
from ingot.ir.errors import OptionError
from ingot.rounding.check import RoundingCheck


def check_all(
    checkpoints: Sequence[str], *, progress: OnProgress = no_progress, **options: Any
) -> Mapping[str, RoundingCheck]:
    """Return the check of each checkpoint by its name as given. `options` are those of `Request.read`.

    Traces all checkpoints before it scores the first. Raises IngotError for the first bad one: OptionError without
    checkpoints or if one is given twice, CheckpointError for tensors that no score can be computed with.
    """
    if not checkpoints:
        raise OptionError("no checkpoint to check", expected="one or more checkpoint folders, or names on the hub")
    if twice := [name for name in checkpoints if checkpoints.count(name) > 1]:
        raise OptionError(f"the checkpoint '{twice[0]}' is given twice", expected="each checkpoint once")
    opened = {}
    for done, name in enumerate(checkpoints):
        progress("trace", done, len(checkpoints))
        request = Request.read(name, progress=progress, **options)
        opened[name] = request, request.trace()
    found = {}
    for done, (name, (request, model)) in enumerate(opened.items()):
        progress("check", done, len(opened))
        found[name] = request.score_fusions(model, folder=str(request.checkpoint.folder))
    return found
