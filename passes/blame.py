"""Attribute the failure of a pass: to Ingot, to the pass's package, or to the program that the pass received."""

import inspect
import traceback

from ingot.ir.errors import IngotError, InternalError, NumericsError, PassError, UserPassError, VerifyError
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify
from ingot.passes.base import Pass


def is_ours(one: Pass) -> bool:
    """Return whether the pass is a part of Ingot, and not of another package."""
    return type(one).__module__.partition(".")[0] == "ingot"


def raised(one: Pass, error: Exception) -> Exception:
    """Return the exception to raise after the pass's `run` raised `error`. It is `error` itself if that already names
    its cause; otherwise it is an error that names the pass."""
    if isinstance(error, IngotError) and not isinstance(error, InternalError):
        return error  # the pass rejects an option or an input
    if not is_ours(one):
        return user_pass_error(one, error)
    if isinstance(error, InternalError):
        error.args = (f"pass {one.name}: {error.args[0]}",)
        return error
    if isinstance(error, OSError | MemoryError):
        return error  # a limit of the machine, reached while compiling
    return PassError(f"pass {one.name}: {type(error).__name__}: {error}", where=_line(one, error))


def user_pass_error(one: Pass, error: Exception) -> UserPassError:
    """Return the error to raise after a pass of another package failed with `error`. It names the pass and its module,
    and says what its author can do."""
    owner = f"pass {one.name} of {type(one).__module__}"
    if not isinstance(error, IngotError):
        return UserPassError(
            f"{owner} raised {type(error).__name__}: {error}", where=_line(one, error), hint="fix the pass"
        )
    problem, hint = "raised", "fix the pass"
    if isinstance(error, VerifyError):
        problem = "makes a program that breaks a rule"
    if isinstance(error, NumericsError):
        problem = "changes what the program computes"
        hint += "; `ingot bisect` finds the wrong rewrite in an artifact compiled without --check-numerics"
    place = ", ".join(filter(None, (_line(one, error), error.where)))
    return UserPassError(f"{owner} {problem}: {error.what}", where=place, expected=error.expected, hint=hint)


def _line(one: Pass, error: Exception) -> str:
    """Return the innermost line of the error's traceback that is in the pass's own file, as text; "" if there is
    none."""
    file = inspect.getfile(type(one).run)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {own[-1].lineno}, in {own[-1].name}" if own else ""


def input_error(one: Pass, program: Program, under: Stage) -> VerifyError | None:
    """Check the program that a failed pass received. Return the error in it, so that the pass is not blamed; None if
    the program was valid.

    `under` is the stage that the pass's pipeline phase leads to. The program must obey the rules of this stage, or
    those of its own stage if the pass is the first of the phase.
    """
    try:
        verify(program, under=under)
    except VerifyError:
        try:
            verify(program)
        except VerifyError as error:
            return VerifyError(
                f"the program was wrong before pass {one.name} saw it: {error.what}",
                where=error.where,
                expected=error.expected,
                hint=error.hint or "fix the program",
            )
    return None
