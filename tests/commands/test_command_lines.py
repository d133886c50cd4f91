"""What a command line may be: help, options, and what is wrong with the others."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from command_world import Command, Done, World, in_process

import ingot.cli.main as cli

pytestmark = pytest.mark.xdist_group("cli")

COMMANDS = (
    "compile",
    "run",
    "export",
    "convert",
    "run-batch",
    "bench",
    "bisect",
    "check",
    "diff",
    "eval",
    "explain",
    "inspect",
    "report",
    "serve",
    "target",
    "verify",
    "why-miss",
)
BENCHES = ("latency", "throughput", "startup", "serve-sim")

HELP = f"""
import contextlib, io, sys
import ingot.cli.main as cli
for app, arguments in [(cli.COMPILE_MODEL, ["--help"]), (cli.INGOT, ["--help"]), (cli.INGOT, ["--version"])] + [
    (cli.INGOT, [name, "--help"]) for name in {COMMANDS}
] + [
    (cli.INGOT, ["bench", name, "--help"]) for name in {BENCHES}
]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert cli.run(app, arguments) == 0
    assert text.getvalue().strip()
slow = "torch numpy pydantic tokenizers safetensors huggingface_hub jinja2 ingot.compile.driver ingot.serve.llm".split()
print(*(name for name in slow if name in sys.modules))
"""


def test_help_imports_nothing_slow() -> None:
    done = in_process(sys.executable, "-c", HELP)
    assert done == Done(0, "\n", "")


def test_inspect_imports_neither_torch_nor_a_compiler(world: World) -> None:
    code = (
        "import sys, ingot.cli.main as cli\n"
        f"for part in ([], ['--plan'], ['--weights'], ['--stage', 'FUSED'], ['--json']):\n"
        f"    assert cli.run(cli.INGOT, ['inspect', {str(world.artifact)!r}, *part]) == 0\n"
        "print('torch' in sys.modules, 'ingot.compile.driver' in sys.modules, file=sys.stderr)"
    )
    done = in_process(sys.executable, "-c", code)
    assert (done.code, done.err) == (0, "False False\n")


def test_help_names_every_option(ingot: Command) -> None:
    text = ingot("compile", "--help").out
    for option in [
        "--output",
        "-o",
        "--target",
        "--backend",
        "--dtype",
        "--max-seq-len",
        "--max-batch",
        "--max-tokens",
        "--passes",
        "--deterministic",
        "--mesh",
        "--trace",
        "-j",
    ]:
        assert option in text
    assert "ingot COMMAND" in ingot().out  # no command at all asks for help


def test_readme_and_page_on_using_name_only_what_exists(ingot: Command) -> None:
    pages = "".join((Path(__file__).parents[2] / page).read_text() for page in ("README.md", "docs/using.md"))
    helps = "".join(ingot(name, "--help").out for name in COMMANDS) + ingot().out
    helps += "".join(ingot("bench", name, "--help").out for name in BENCHES)
    commands = set(re.findall(r"`ingot ([a-z-]+)", pages))
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", pages))
    assert commands == set(COMMANDS) and options
    assert [option for option in sorted(options) if not re.search(rf"{option}(?![\w-])", helps)] == []


def test_the_defaults_are_those_of_compile_model() -> None:
    from ingot.cli.commands.compile import compile_checkpoint
    from ingot.compile.driver import compile_model

    ours = {name: one.default for name, one in inspect.signature(compile_checkpoint).parameters.items()}
    theirs = {name: one.default for name, one in inspect.signature(compile_model).parameters.items()}
    del theirs["progress"], theirs["on_pass"]
    assert ours == theirs


def test_a_request_takes_what_compile_model_takes() -> None:
    """Their lists of options are two, so that the names and defaults of both are seen where they are called."""
    from ingot.compile.driver import compile_model
    from ingot.compile.request import Request

    asked = dict(inspect.signature(compile_model).parameters)
    for how in ("output", "jobs", "check_numerics", "on_pass"):  # decide nothing of what is made
        del asked[how]
    assert list(inspect.signature(Request.read).parameters.values()) == list(asked.values())


@pytest.mark.parametrize(
    ("arguments", "complaint", "usage"),
    [
        (["compil", "x"], "compil", "Usage: ingot COMMAND"),
        (["--compile"], "--compile", "Usage: ingot COMMAND"),
        (["run"], "ARTIFACT", "Usage: ingot run"),
        (["run", "x", "y", "z"], "z", "Usage: ingot run"),
        (["run", "x", "- list"], "after '--'", "Usage: ingot run"),
        (["run", "x", "y", "--max-tokens", "many"], "many", "Usage: ingot run"),
        (["inspect", "x", "--plans"], "--plan", "Usage: ingot inspect"),
        (["diff", "x"], "AFTER", "Usage: ingot diff"),
        (["target", "cpu"], "cpu", "Usage: ingot target"),
        (["compile", "x"], "--output", "Usage: ingot compile"),
        (["compile", "x", "-o", "y", "--dtype", "int8"], "bfloat16", "Usage: ingot compile"),
        (["compile", "x", "-o", "y", "--no-deterministic"], "--no-deterministic", "Usage: ingot compile"),
    ],
)
def test_a_wrong_command_line_ends_with_usage(ingot: Command, arguments: list[str], complaint: str, usage: str) -> None:
    done = ingot(*arguments)
    assert (done.code, done.out) == (cli.BAD_INPUT, "")
    assert done.err.startswith("error: ") and complaint in done.err and usage in done.err
