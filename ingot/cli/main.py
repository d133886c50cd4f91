"""The commands `ingot` and `compile-model`, and their exit codes.

0: done; 1: an Ingot fault; 2: bad input; 130: interrupted; 141: the reader of stdout closed the pipe. A command may
define further codes from 3 on.
"""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, UnknownOptionError

from ingot.cli.commands.bench import BENCH
from ingot.cli.commands.bisect import bisect_artifact
from ingot.cli.commands.check import check_checkpoints
from ingot.cli.commands.compile import compile_checkpoint
from ingot.cli.commands.convert import convert_checkpoint
from ingot.cli.commands.diff import diff_artifacts
from ingot.cli.commands.eval import evaluate_model
from ingot.cli.commands.explain import explain_artifact
from ingot.cli.commands.export import export_to
from ingot.cli.commands.inspect import inspect_artifact
from ingot.cli.commands.report import report_artifact
from ingot.cli.commands.run import run_model
from ingot.cli.commands.run_batch import run_batch_file
from ingot.cli.commands.serve import SERVE_SOURCES, serve_model
from ingot.cli.commands.target import show_target
from ingot.cli.commands.verify import verify_artifact
from ingot.cli.commands.why_miss import why_artifacts_differ
from ingot.cli.console import console
from ingot.ir.errors import IngotError, InternalError, OutputError, PassError

DONE, OUR_FAULT, BAD_INPUT = 0, 1, 2
INTERRUPTED, NO_READER = 130, 141  # 128 + SIGINT and 128 + SIGPIPE, as shells report them


def _version() -> str:
    from importlib.metadata import version

    return version("ingot")


_COMPILE_USAGE = "CHECKPOINT -o NAME.ingot [OPTIONS]"

INGOT = App(
    name="ingot",
    help="Compile a language model once, load it in seconds, and look at every step of the way.",
    usage="Usage: ingot COMMAND [OPTIONS]",
    version=_version,
)
INGOT.command(BENCH)
INGOT.command(bisect_artifact, name="bisect", usage="Usage: ingot bisect ARTIFACT [OPTIONS]")
INGOT.command(check_checkpoints, name="check", usage="Usage: ingot check CHECKPOINT… [OPTIONS]")
INGOT.command(compile_checkpoint, name="compile", usage=f"Usage: ingot compile {_COMPILE_USAGE}")
INGOT.command(convert_checkpoint, name="convert", usage="Usage: ingot convert SOURCE OUTPUT --to mla [OPTIONS]")
INGOT.command(run_model, name="run", usage="Usage: ingot run ARTIFACT [PROMPT] [OPTIONS]")
INGOT.command(run_batch_file, name="run-batch", usage="Usage: ingot run-batch -i FILE -o FILE --model MODEL [OPTIONS]")
INGOT.command(serve_model, name="serve", usage="Usage: ingot serve MODEL [OPTIONS]", config=SERVE_SOURCES)
INGOT.command(diff_artifacts, name="diff", usage="Usage: ingot diff A B [OPTIONS]")
INGOT.command(evaluate_model, name="eval", usage="Usage: ingot eval MODEL [LM-EVAL OPTIONS]")
INGOT.command(explain_artifact, name="explain", usage="Usage: ingot explain ARTIFACT [OPTIONS]")
INGOT.command(export_to, name="export", usage="Usage: ingot export SOURCE OUTPUT --to FORM [OPTIONS]")
INGOT.command(inspect_artifact, name="inspect", usage="Usage: ingot inspect ARTIFACT [OPTIONS]")
INGOT.command(report_artifact, name="report", usage="Usage: ingot report ARTIFACT -o NAME.html")
INGOT.command(show_target, name="target", usage="Usage: ingot target [OPTIONS]")
INGOT.command(verify_artifact, name="verify", usage="Usage: ingot verify ARTIFACT [OPTIONS]")
INGOT.command(why_artifacts_differ, name="why-miss", usage="Usage: ingot why-miss A B [COMPILE OPTIONS]")

COMPILE_MODEL = App(name="compile-model", usage=f"Usage: compile-model {_COMPILE_USAGE}", version=_version)
COMPILE_MODEL.default(compile_checkpoint)
for flag in ("--help", "--version"):
    COMPILE_MODEL[flag].group = "Parameters"  # it has no commands to list them under


def main() -> None:
    """Run the command `ingot` with the process's arguments, and exit with its code."""
    sys.exit(run(INGOT, sys.argv[1:]))


def compile_model_main() -> None:
    """Run the command `compile-model` with the process's arguments, and exit with its code."""
    sys.exit(run(COMPILE_MODEL, sys.argv[1:]))


def run(app: App, arguments: Sequence[str]) -> int:
    """Run one command line of `app`. Report errors on stderr, and return the exit code.

    SystemExit is the only exception that is raised.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe without Unicode still receives the text, with escapes where needed.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        command, bound, *_ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _refuse(app, error)
    except IngotError as error:  # of a file with options
        _complain(str(error))
        return error.exit_code
    return _guarded(lambda: command(*bound.args, **bound.kwargs))


def _refuse(app: App, error: CycloptsError) -> int:
    """Print the error of a command line that cannot be parsed, with the command's usage. Return the exit code."""
    at = app
    for name in error.command_chain or ():
        at = at[name]
    _complain(str(error))
    hint = "--help describes the options"
    if isinstance(error, UnknownOptionError) and at is not INGOT:
        hint += "; an argument that begins with '-' goes after '--'"
    console(stderr=True).print(f"{at.usage}\n{hint}", markup=False, soft_wrap=True)
    return BAD_INPUT


def _guarded(body: Callable[[], object]) -> int:
    try:
        code = body()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, because an error at exit could not be reported
        return code if isinstance(code, int) else DONE
    except IngotError as error:
        if isinstance(error, PassError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # a bug in one of Ingot's passes: show where it is
        _complain(str(error))
        if isinstance(error, InternalError):
            console(stderr=True).print("This is Ingot's fault: please report it, with the command line.", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return NO_READER
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _drop_stdout()
            _complain(str(OutputError(f"standard output cannot be written: {error.strerror}")))
            return OutputError.exit_code
        traceback.print_exc()
        _complain(
            "internal error\n  to do:    this is Ingot's fault: please report it, with the command line and the above"
        )
        return OUR_FAULT


def _complain(message: str) -> None:
    from rich.text import Text

    with contextlib.suppress(OSError):  # there is no other place to report it
        console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def _drop_stdout() -> None:
    """Discard buffered output after a write to stdout failed. Otherwise Python would write it again at exit, and fail
    again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
