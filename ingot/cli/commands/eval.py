"""`ingot eval`: evaluate a model with lm-eval."""

from typing import Annotated

from cyclopts import Parameter

Passed = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


def evaluate_model(model: str, /, *arguments: Passed) -> None:
    """Evaluate a model with lm-eval, which must be installed. All further arguments are those of `lm-eval run`.

    For example: ingot eval pico.ingot --tasks arc_easy --limit 100

    Parameters
    ----------
    model
        An artifact folder, or a checkpoint: a folder or a repository on the hub, which is compiled first and cached.
        Options of compiling and serving follow --model_args, as in --model_args dtype=float32.
    arguments
        Options of `lm-eval run`.
    """
    from ingot.harness.run_lm_eval import run_lm_eval

    run_lm_eval(model, arguments)
