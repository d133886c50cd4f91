"""`ingot check`: score how risky each fusion is for the rounding of checkpoints."""

from typing import Annotated, Literal

from cyclopts import Parameter

from ingot.cli.commands import AsJson
from ingot.cli.console import console, print_json
from ingot.cli.views.rounding import print_checks

HAS_RISKS = 3  # distinct from the general exit codes


def check_checkpoints(
    *checkpoints: str,
    target: str = "auto",
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    passes: str = "default",
    exit_code: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> int:
    """Score each fusion with the weights of checkpoints. A score is the fusion's error divided by the allowed error.

    A score is the median of three samples. Above 2 a fusion is a risk: a compile computes its calls separately. Other
    fusions with a sample above 1 are listed as near a risk. Nothing is compiled. Of large tensors, only a few rows are
    read.

    Parameters
    ----------
    checkpoints
        Hugging Face checkpoint folders, or names on the hub: org/name or org/name@REVISION. One table shows them all.
    target
        The machine to compile for, as in `ingot compile`.
    dtype
        Dtype of weights and activations. auto keeps the dtype of each checkpoint.
    passes
        Changes to the pipeline of passes, as in "default,-merge-linears,quantize{format=int8}". -NAME removes a pass.
        NAME adds a pass, or sets its options.
    exit_code
        Exit with 3 if a fusion is a risk.
    """
    from ingot.cli.progress import live_progress
    from ingot.debug.check_checkpoints import check_all

    with live_progress() as progress:
        checks = check_all(checkpoints, target=target, dtype=dtype, passes=passes, progress=progress)
    if json:
        print_json({name: check.to_json() for name, check in checks.items()})
    else:
        print_checks(console(), checks)
    return HAS_RISKS if exit_code and any(check.risks for check in checks.values()) else 0
