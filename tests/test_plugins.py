"""Ops and passes of another package, found by its entry points: in the pipeline, in an artifact, in a new process."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from drawn import in_one_of
from installed import install
from tiny import TINY

import ingot.cli.main as cli
from ingot import compile_model
from ingot.ir.errors import OptionError, UnknownPassError
from ingot.ir.plugins import load_user_ops, load_user_pass, user_pass_names
from ingot.ir.program import Stage
from ingot.passes.pipeline import PIPELINE, edit_pipeline

pytestmark = pytest.mark.one_in_file(3)

ROOT = Path(__file__).parents[1]
OPS = '''
"""An op: relu(x) * scale, row by row."""
import torch
from ingot.ir.ops import Sample, define
from ingot.ir.placements import whole


def _samples(g, dtype):
    return [Sample((torch.randn(3, 8, generator=g).to(dtype),), {"scale": 2.0})]


@define(rows=("x",), samples=_samples, placement=whole, flops=2)
def scaled_relu(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    """relu(x) * scale in x's dtype."""
    return torch.relu(x) * scale
'''
PASSES = '''
from dataclasses import dataclass
from typing import ClassVar

from ingot.ir import ops
from ingot.ir.program import Stage
from ingot.ir.artifact.record import Numerics
from ingot.passes.base import Pass
from my_package.ops import scaled_relu


@dataclass(frozen=True)
class CutLogits(Pass):
    """The hidden state in front of the head goes through the op."""

    name: ClassVar[str] = "cut-logits"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    scale: float = 1.5
    calls: int = 1

    def run(self, rewriter, context):
        last = list(rewriter.program.calls(ops.rms_norm.overload))[-1:]
        for node in last[: self.calls]:
            rewriter.take(node)
            new = rewriter.call(scaled_relu, node, before=node.next, scale=self.scale)
            for user in list(node.users):
                if user is not new:
                    user.replace_input_with(node, new)


@dataclass(frozen=True)
class Early(CutLogits):
    name: ClassVar[str] = "early"
    joins: ClassVar[Stage] = Stage.NORMAL


@dataclass(frozen=True)
class Nameless(CutLogits):
    name: ClassVar[str] = "another-name"


not_a_pass = 7
'''
PASS = """
from dataclasses import dataclass
from typing import ClassVar
from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.passes.base import Pass
@dataclass(frozen=True)
class {made}(Pass):
    name: ClassVar[str] = "{name}"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    def run(self, rewriter, context):
        {body}
"""
ENTRY_POINTS = {
    "ingot.ops": {"my_ops": "my_package.ops"},
    "ingot.passes": {
        "cut-logits": "my_package.passes:CutLogits",
        "early": "my_package.passes:Early",
        "nameless": "my_package.passes:Nameless",
        "seven": "my_package.passes:not_a_pass",
    },
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path / "site", "my_package", ENTRY_POINTS, ops=OPS, passes=PASSES)
    return tmp_path / "site"


def python(code: str, *sites: Path) -> str:
    """What `code` prints in a new process, so that its ops are defined there only; a failure shows its traceback."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *sites, *sys.path)))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


EDITS = """
from ingot.ir.errors import OptionError
from ingot.ir.program import Stage
from ingot.passes.pipeline import edit_pipeline

def places(text):
    return [(phase.stage.name, one.name, one.options()) for phase in edit_pipeline(text) for one in phase.passes
            if type(one).__module__ == "my_package.passes"]

def problem(text):
    try:
        edit_pipeline(text)
    except OptionError as error:
        return error.what, error.expected

assert places("default") == []
assert places("default,cut-logits") == [("FUSED", "cut-logits", {"scale": 1.5, "calls": 1})]
assert places("default,cut-logits{scale=0.25, calls=3}") == [("FUSED", "cut-logits", {"scale": 0.25, "calls": 3})]
# Twice is once, with the options of both.
assert places("default,cut-logits{calls=0},cut-logits{scale=2.5}") == [
    ("FUSED", "cut-logits", {"scale": 2.5, "calls": 0})
]
assert [place[:2] for place in places("default,early,cut-logits")] == [("NORMAL", "early"), ("FUSED", "cut-logits")]
assert edit_pipeline("default,cut-logits,-merge-linears")[2].passes[-1].name == "cut-logits"
assert problem("default,cut-logits{size=1}") == ("pass 'cut-logits' has no option 'size'", "scale, calls")
assert problem("default,cut-logits{scale=big}") == ("option 'scale' of pass 'cut-logits' is 'big'", "a value like 1.5")
assert problem("default,nameless") == (
    "the pass 'nameless' has the name 'another-name' in its class my_package.passes.Nameless", 'name = "nameless"'
)
assert problem("default,seven") == ("the pass 'seven' is 7", "a subclass of ingot.passes.base.Pass")
assert problem("default,cut-logit")[0] == "unknown pass 'cut-logit'"
print("ok")
"""


def test_a_pass_of_another_package_joins_the_pipeline(site: Path) -> None:
    assert python(EDITS, site) == "ok\n"


RUN = """
from pathlib import Path
import torch
from tiny import TINY
from ingot import compile_model
from ingot.ir.interpret import interpret
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.text import print_program
from ingot.ir.verify import RULES, verify

folder = Path(FOLDER)
tiny = TINY["llama-plain"]
assert "scaled_relu" not in OPS
options = dict(backend="reference", max_seq_len=tiny.max_seq_len, max_batch=8, max_tokens=256, jobs=1)
source = tiny.write(folder / "checkpoint")
report = compile_model(source, folder / "cut.ingot", passes="default,cut-logits{scale=0.5}", **options)
plain = compile_model(source, folder / "plain.ingot", **options)
assert report.request_key != plain.request_key
assert all("ingot.scaled_relu" in rules.ops() for rules in RULES.values())

text = (folder / "cut.ingot" / "program.ir").read_text()
program = parse_program(text)
assert text.count("ingot.scaled_relu(") == 1 and "scale=0.5" in text and print_program(program) == text
body = "program p stage=NORMAL\\ndim T in [1, 8]\\ninput x: f32[T, 4]\\n" \\
    "%y = ingot.scaled_relu(%x, scale=3.0) : f32[T, 4]\\nreturn y=%y\\n"
small = parse_program(body)
verify(small)
x = torch.randn(5, 4)
for rowwise in (False, True):
    assert torch.equal(interpret(small, {"x": x}, rowwise=rowwise)["y"], torch.relu(x) * 3.0)
assert OPS["scaled_relu"].overload(x.to("meta"), scale=1.0).shape == x.shape
print("ok")
"""
SERVE = """
import sys
from pathlib import Path
import torch
from tiny import TINY
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.ops import OPS
from ingot.runtime.loading.loader import load_artifact

folder, tiny = Path(FOLDER), TINY["llama-plain"]
logits = {}
for name in ("plain", "cut"):
    assert "scaled_relu" not in OPS, "a plan without the op loads no package of plugins"
    loaded = load_artifact(folder / f"{name}.ingot", num_pages=64)
    executor = loaded.executor
    run = lambda inputs: executor.launch(inputs).outputs
    logits[name] = torch.cat(teacher_forced(executor.inputs, run, tiny.prompts()[:3], chunk=7))
    calls = [one for one in loaded.plan.buckets[0].instructions if one.target == "ingot.scaled_relu"]
    assert len(calls) == (name == "cut")
assert "ingot.frontend" not in sys.modules and "ingot.passes" not in sys.modules

# The head by hand: logits = head(relu(h) * 0.5), where the plain artifact's are head(h).
from safetensors.torch import load_file
head = load_file(folder / "checkpoint" / "model.safetensors")["lm_head.weight"].double()
hidden = torch.linalg.lstsq(head, logits["plain"].double().T).solution
wanted = (head @ (hidden.relu() * 0.5)).T
error = float((logits["cut"] - wanted).abs().max())
assert error < 1e-3, error
assert float((logits["cut"] - logits["plain"]).abs().max()) > 0.1
print("ok")
"""


@in_one_of(3)
def test_an_op_of_another_package_from_compile_to_a_new_process(site: Path, tmp_path: Path) -> None:
    assert python(f"FOLDER = {str(tmp_path)!r}\n{RUN}", site) == "ok\n"
    assert python(f"FOLDER = {str(tmp_path)!r}\n{SERVE}", site) == "ok\n"
    # Where the package is not installed, loading says which op is unknown.
    code = f"""
from ingot.ir.errors import ArtifactError
from ingot.runtime.loading.loader import load_artifact
try:
    load_artifact({str(tmp_path / "cut.ingot")!r}, num_pages=4)
except ArtifactError as error:
    print(error.what, "|", error.where)
"""
    told = python(code)
    assert "the op is unknown" in told and "ingot.scaled_relu" in told


KEYS = """
from tiny import TINY
from ingot.backends.reference.emit import Reference
from ingot.compile.request import Request
from ingot.compile.identity import exe_key
from ingot.ir.parse import parse_program
from ingot.ir.program import Region
from ingot.ir.machine.target import Target

body = "program p stage=NORMAL\\ndim T in [1, 8]\\ninput x: f32[T, 4]\\n" \\
    "%y = ingot.{op} : f32[T, 4]\\nreturn y=%y\\n"
request = Request.read(TINY["llama-plain"].write(FOLDER), backend="reference")
print(request.key(request.trace()))
for call in ("scaled_relu(%x, scale=3.0)", "soft_cap(%x, cap=3.0)"):
    region = Region("r", parse_program(body.replace("{op}", call)), "reference")
    print(exe_key(region, Reference(), Target.detect("cpu")))
"""


@pytest.mark.slow
def test_the_code_of_an_op_is_part_of_what_it_bears_on(site: Path, tmp_path: Path) -> None:
    """A compile, and the executables that compute the op; no others."""
    code = f"from pathlib import Path\nFOLDER = Path({str(tmp_path / 'checkpoint')!r})\n{KEYS}"
    before = python(code, site).split()
    file = site / "my_package" / "ops.py"
    file.write_text(file.read_text().replace("torch.relu(x) * scale", "torch.relu(x) * scale * 2"))
    after = python(code, site).split()
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on this process's path."""
    folder = tmp_path / "importable"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    load_user_ops.cache_clear()
    yield folder
    load_user_ops.cache_clear()


BROKEN = {
    "no module": ("gone_package.passes:Pass", "", "ModuleNotFoundError: No module named 'gone_package.passes'"),
    "no attribute": ("gone_package.code:Pass", "x = 1", "AttributeError: module 'gone_package.code' has no attribute"),
    "an error": ("gone_package.code:Pass", "1 / 0", "ZeroDivisionError: division by zero"),
    "a syntax error": ("gone_package.code:Pass", "def", "SyntaxError: "),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("group", ["ingot.ops", "ingot.passes"])
def test_a_broken_entry_point_names_its_package(group: str, kind: str, importable: Path) -> None:
    value, code, message = BROKEN[kind]
    package = f"gone_{group[-3:]}_{abs(hash(kind))}"  # modules are imported once a process
    value, message = value.replace("gone_package", package), message.replace("gone_package", package)
    install(importable, package, {group: {"mine": value}}, code=code)
    with pytest.raises(OptionError) as caught:
        load_user_ops() if group == "ingot.ops" else edit_pipeline("default,mine")
    error = caught.value
    assert error.what.startswith(f"the entry point 'mine' of '{group}' does not load: {message}")
    assert error.where == value and package.replace("_", "-") in error.hint.replace("_", "-")


def test_a_broken_package_that_is_not_used_causes_no_error(importable: Path) -> None:
    install(importable, "gone_quiet", {"ingot.passes": {"mine": "gone_quiet.nothing:Pass"}})
    good = {"ingot.passes": {"good-pass": "good_package.code:Good"}}
    install(importable, "good_package", good, code=PASS.format(name="good-pass", made="Good", body="pass"))
    assert edit_pipeline("default") == PIPELINE
    assert edit_pipeline("default,-normalize") != PIPELINE
    assert any(one.name == "good-pass" for phase in edit_pipeline("default,good-pass") for one in phase.passes)


def test_an_unknown_pass_is_looked_for_among_the_packages_by_name_alone(importable: Path) -> None:
    install(importable, "gone_quiet", {"ingot.passes": {"wide-head": "gone_quiet.nothing:Pass"}})
    with pytest.raises(UnknownPassError, match="the nearest is 'wide-head'; or install the package") as caught:
        edit_pipeline("default,wide-heads")
    assert caught.value.expected.endswith(", wide-head")


def test_two_packages_with_one_name(importable: Path) -> None:
    for package in ("one_package", "other_package"):
        install(importable, package, {"ingot.passes": {"mine": f"{package}.code:Good"}}, code="1 / 0")
    with pytest.raises(OptionError, match="two packages define a pass 'mine'"):
        edit_pipeline("default,mine")


MADE = {  # what is changed in a right class, and what is said
    "no name": ('    name: ClassVar[str] = "mine"\n', "", "has the name None in its class"),
    "no promise": ("    numerics: ClassVar[Numerics] = Numerics.EXACT\n", "", "has no numerics contract"),
    "a promise in words": ("= Numerics.EXACT", '= "exact"', "has no numerics contract"),
    "a stage in words": ("    def run", '    joins = "NORMAL"\n\n    def run', "has no stage to join"),
    "not frozen": ("(frozen=True)", "", "@dataclass(frozen=True) above the class"),
    "no dataclass": ("@dataclass(frozen=True)\n", "", "@dataclass(frozen=True) above the class"),
    "no default": ("    def run", "    size: int\n\n    def run", "has options without a default (size)"),
    "no run": ("def run", "def go", "does not define run"),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_class_that_is_no_pass_is_refused_by_name(kind: str, importable: Path) -> None:
    old, new, said = MADE[kind]
    package = f"made_{list(MADE).index(kind)}"
    code = PASS.format(name="mine", made="Made", body="pass")
    assert old in code
    install(importable, package, {"ingot.passes": {"mine": f"{package}.code:Made"}}, code=code.replace(old, new))
    with pytest.raises(OptionError, match="the pass 'mine'") as caught:
        edit_pipeline("default,mine")
    assert said in str(caught.value) and f"{package}.code.Made" in caught.value.what


# What a pass of another package does wrong is its author's to mend.

WRONG = {
    "raises": ("return [][1]", "raised IndexError: list index out of range", "code.py, line 12, in run"),
    "breaks a rule": (
        "next(iter(rewriter.program.calls())).meta.pop('type')",
        "makes a program that breaks a rule: a node without a type",
        "after pass mine",
    ),
    "breaks its promise": (
        "node = list(rewriter.program.calls(ops.rms_norm.overload))[-1]; node.kwargs = {**node.kwargs, 'eps': 0.5}",
        "changes what the program computes: pass mine broke its numerics contract, exact",
        "program main; first at %",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_the_fault_of_another_package(
    kind: str, importable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, said, where = WRONG[kind]
    package = f"wrong_{list(WRONG).index(kind)}"
    code = PASS.format(name="mine", made="Made", body=body)
    install(importable, package, {"ingot.passes": {"mine": f"{package}.code:Made"}}, code=code)
    source = TINY["llama-plain"].write(tmp_path / "checkpoint")
    options = "--backend reference --max-batch 2 --max-tokens 32 --max-seq-len 40 -j 1 --check-numerics --passes"
    command = [str(source), "-o", str(tmp_path / "m.ingot"), *options.split(), "default,mine"]
    assert cli.run(cli.COMPILE_MODEL, command) == cli.BAD_INPUT
    err = capsys.readouterr().err
    assert f"error: pass mine of {package}.code {said}" in err and where in err and "fix the pass" in err
    assert "Ingot's fault" not in err and "Traceback" not in err
    assert not (tmp_path / "m.ingot").exists()


def test_an_artifact_whose_pass_is_gone(importable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = PASS.format(name="mine", made="Made", body="pass")
    install(importable, "leaving", {"ingot.passes": {"mine": "leaving.code:Made"}}, code=code)
    source = TINY["llama-plain"].write(tmp_path / "checkpoint")
    options = dict(backend="reference", max_seq_len=40, max_batch=2, max_tokens=32, jobs=1)
    compile_model(source, tmp_path / "m.ingot", passes="default,mine", **options)  # type: ignore[arg-type]
    shutil.rmtree(importable / "leaving-1.0.dist-info")
    importlib.invalidate_caches()
    assert cli.run(cli.INGOT, ["bisect", str(tmp_path / "m.ingot")]) == cli.BAD_INPUT
    err = capsys.readouterr().err
    assert "compiled with the pass 'mine', which is not installed" in err
    assert "install the package that brings it" in err and "--passes" not in err


def test_without_packages_there_is_nothing() -> None:
    load_user_ops.cache_clear()
    assert load_user_ops() == () and user_pass_names() == () and load_user_pass("mine") is None
    assert all(one.joins is Stage.FUSED for phase in PIPELINE for one in phase.passes)
