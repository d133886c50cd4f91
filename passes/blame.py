"""Attribute the failure of a pass: to Ingot, to the pass's package, or to the program that the pass received."""

import inspect
import traceback

from ingot.ir.errors import IngotError, InternalError, NumericsError, PassError, UserPassError, VerifyError
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify
from ingot.passes.base import Pass


def is_ours(one: Pass) -> bool:
    """Return whether the pass is part of Ingot, not of another package."""
    return type(one).__module__.partition(".")[0] == "ingot"


def raised(one: Pass, error: Exception) -> Exception:
    """Return the exception to raise after `run` of the pass raised `error`.

    It is `error` itself if that already names the cause. Otherwise it is an error that names the pass.
    """
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
    """Return the error for a pass of another package that failed with `error`.

    It names the pass and its module, and says what the author of the pass can do.
    """
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
    """Return the line of the pass's own file in which `error` arose, as text; "" if there is none.

    It is the innermost such line of the traceback.
    """
    file = inspect.getfile(type(one).run)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {own[-1].lineno}, in {own[-1].name}" if own else ""


def input_error(one: Pass, program: Program, under: Stage) -> VerifyError | None:
    """Return the error in the program that a failed pass received; None if that program was valid.

    If it was not valid, the pass is not to blame. `under` is the stage to which the pass's phase leads. The program
    must obey the rules of this stage or of its own stage.
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
