"""Attribute the failure of a pass: to Ingot, to the pass's package, or to the program that the pass received."""

import inspect
import traceback

from ingot.ir.errors import IngotError, InternalError, NumericsError, PassError, UserPassError, VerifyError
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify
from ingot.passes.base import Pass


def is_ours(one: Pass) -> bool:
    """Return whether Ingot itself defines the pass, and not another package."""
    return type(one).__module__.partition(".")[0] == "ingot"


def raised(one: Pass, error: Exception) -> Exception:
    """Return the exception to raise when the pass's `run` raised `error`. It is `error` itself if that names the cause
    clearly."""
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
    """Return the error for a failed pass of another package. It names the package and says what the author can do."""
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
    """Return the innermost line of the traceback that is in the pass's file, as text; empty if there is none."""
    file = inspect.getfile(type(one).run)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {own[-1].lineno}, in {own[-1].name}" if own else ""


def input_error(one: Pass, program: Program, under: Stage) -> VerifyError | None:
    """Return the error in the program that a pass received; None if it was valid. It is called only after a failure.

    In the middle of a phase a program obeys the rules of the phase's stage `under`, at its beginning those of its own
    stage.
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
