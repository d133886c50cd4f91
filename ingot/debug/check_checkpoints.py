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
    """Check how risky each fusion is with the weights of each checkpoint. Return a mapping from checkpoint to its
    check.

    Keys are the names in `checkpoints`. `options` are the arguments of `Request.read`. All checkpoints are traced
    before the first one is checked.

    Raises OptionError if no checkpoint is given, or if one is given twice. Raises CheckpointError if the tensors of a
    checkpoint cannot be used to compute scores.
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
