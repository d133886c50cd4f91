"""Whose fault it is when a pass fails: Ingot's, that of the package that brings it, or the program's before it."""

import inspect
import traceback

from ingot.ir.errors import IngotError, InternalError, NumericsError, PassError, UserPassError, VerifyError
from ingot.ir.program import Program, Stage
from ingot.ir.verify import verify
from ingot.passes.base import Pass


def is_ours(one: Pass) -> bool:
    """Whether the pass is one of Ingot's."""
    return type(one).__module__.partition(".")[0] == "ingot"


def raised(one: Pass, error: Exception) -> Exception:
    """What to raise in place of `error`, which came out of the pass's `run`; `error` itself where it says enough."""
    if isinstance(error, IngotError) and not isinstance(error, InternalError):
        return error  # an option or an input that the pass refuses
    if not is_ours(one):
        return user_pass_error(one, error)
    if isinstance(error, InternalError):
        error.args = (f"pass {one.name}: {error.args[0]}",)
        return error
    if isinstance(error, OSError | MemoryError):
        return error  # the machine's limits, met while something is compiled
    return PassError(f"pass {one.name}: {type(error).__name__}: {error}", where=_line(one, error))


def user_pass_error(one: Pass, error: Exception) -> UserPassError:
    """The same said of a pass that is not Ingot's: whose it is, and what its author can do."""
    owner = f"pass {one.name} of {type(one).__module__}"
    if not isinstance(error, IngotError):
        return UserPassError(
            f"{owner} raised {type(error).__name__}: {error}", where=_line(one, error), hint="mend the pass"
        )
    problem, hint = "raised", "mend the pass"
    if isinstance(error, VerifyError):
        problem = "makes a program that breaks a rule"
    if isinstance(error, NumericsError):
        problem = "changes what the program computes"
        hint += "; without --check-numerics an artifact is made, in which `ingot bisect` finds the rewrite that does it"
    place = ", ".join(filter(None, (_line(one, error), error.where)))
    return UserPassError(f"{owner} {problem}: {error.what}", where=place, expected=error.expected, hint=hint)


def _line(one: Pass, error: Exception) -> str:
    """The innermost line of the pass's own file on the way to the error; "" where it is not on the way."""
    file = inspect.getfile(type(one).run)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {own[-1].lineno}, in {own[-1].name}" if own else ""


def input_error(one: Pass, program: Program, under: Stage) -> VerifyError | None:
    """What is wrong with the program that a pass was given, looked for only once something has gone wrong.

    In the middle of a phase a program keeps the rules of the stage that it is on the way to, at its beginning those of
    its own.
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
                hint=error.hint or "mend the program",
            )
    return None
