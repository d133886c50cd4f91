"""Run lm-eval with the model "ingot"."""

import sys
from collections.abc import Sequence

from ingot.ir.errors import OptionError

NAME = "ingot"
_MODEL = "ingot.harness.lm_eval_model:IngotLM"


def register() -> None:
    """Make the model "ingot" known to lm-eval. Raises OptionError if lm-eval is not installed or too old."""
    try:
        import lm_eval.models  # noqa: F401 - registers lm-eval's own models
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise OptionError(
            f"lm-eval cannot be imported: {error}", expected="lm-eval 0.4.13 or newer", hint="pip install lm-eval"
        ) from None
    if NAME not in model_registry:
        model_registry.register(NAME, target=_MODEL)


def run_lm_eval(model: str, arguments: Sequence[str]) -> None:
    """Evaluate a model with lm-eval's command line.

    model       an artifact, a checkpoint folder, or a repository on the hub as org/name
    arguments   options of `lm-eval run`, such as ["--tasks", "arc_easy"]; those of --model_args reach `ingot.LLM`

    Raises OptionError if lm-eval is not installed. lm-eval ends the process for options that it does not know.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    # lm-eval reads a quoted text as a Python literal, so a path of digits or with a comma stays a text.
    given = ["lm-eval", "run", "--model", NAME, "--model_args", f"pretrained={model!r}", *arguments]
    before, sys.argv = sys.argv, given
    try:
        cli_evaluate()
    finally:
        sys.argv = before
