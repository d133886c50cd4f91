"""The tuning log: written with an artifact, given to another compile, and made by timing tile sizes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drawn import in_one_of

import ingot.compile.compiled_target
import ingot.ir.machine.target
from ingot import CompileReport, compile_model
from ingot.cli.main import INGOT, run
from ingot.compile.recorded_request import recorded_request
from ingot.compile.request import Request
from ingot.compile.timing.tuner import Tuner
from ingot.compile.timing.tuning_log import read_log
from ingot.ir.artifact.manifest import EXECUTABLES, TUNING
from ingot.ir.artifact.tuning import Choice, TuningLog
from ingot.ir.errors import IngotError, OptionError, TargetError
from ingot.ir.machine.gpus import Gpu
from ingot.ir.machine.target import Target
from ingot.runtime.loading.artifact import open_artifact

pytestmark = pytest.mark.one_in_file(3)

NAME = "llama-plain"
OPTIONS: dict[str, Any] = {"target": "sm_90", "dtype": "bfloat16", "max_batch": 1, "max_tokens": 1}
NO_GPU = "this machine has no GPU that can be used"
SM_90 = Target.named("sm_90")
LACKS = {"reason": "the given log has none"}
PRODUCTS = 5  # of a decoder's step: qkv, o, gate and up, down, head


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, wherever the tests run, on which Triton compiles."""
    _unplug(monkeypatch)


def _unplug(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Gpu:
        raise TargetError(NO_GPU)

    monkeypatch.setattr(ingot.ir.machine.target, "find_gpu", find)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> CompileReport:
    """A compile with the tile sizes that lowerings know."""
    with pytest.MonkeyPatch.context() as patch:
        _unplug(patch)
        return compile_model(checkpoint(NAME), tmp_path_factory.mktemp("tuning") / "plain.ingot", **OPTIONS, jobs=1)


@pytest.fixture
def compile_it(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., CompileReport]:
    made: list[Path] = []

    def call(**options: Any) -> CompileReport:
        made.append(tmp_path / f"{len(made)}.ingot")
        return compile_model(checkpoint(NAME), made[-1], **{**OPTIONS, "jobs": 1, **options})

    return call


def _log(report: CompileReport) -> TuningLog:
    return read_log(report.output, SM_90)


def _executables(report: CompileReport) -> set[str]:
    return set(report.plans.executables)


def _products(log: TuningLog) -> list[Choice]:
    return [choice for choice in log.choices if choice.kernel == "linear"]


def _faster(choice: Choice) -> Choice:
    """As if twice the warps had been measured to be faster."""
    tiles = {**choice.tiles, "warps": 2 * choice.tiles["warps"]}
    return choice.model_copy(update={"tiles": tiles, "microseconds": 12.5, "source": "measured"})


def test_an_artifact_says_which_tiles_its_kernels_have(plain: CompileReport) -> None:
    log = _log(plain)
    assert (log.target, log.cores) == ("sm_90", SM_90.cores)
    assert len(_products(log)) == PRODUCTS and len(log.choices) == PRODUCTS + 1, "the sixth is attention"
    assert {(choice.source, choice.microseconds) for choice in log.choices} == {("heuristic", None)}


def test_a_log_given_back_makes_the_same_executables(
    plain: CompileReport, compile_it: Callable[..., CompileReport], checkpoint: Callable[[str], Path]
) -> None:
    again = compile_it(tuning_log=plain.output)
    assert _executables(again) == _executables(plain) and again.cached_executables == again.distinct_regions
    assert {choice.source for choice in _log(again).choices} == {"given"}
    assert again.request_key != plain.request_key, "a given log is part of the request"
    request = recorded_request(open_artifact(again.output), checkpoint(NAME))
    assert request.tuning_log == _log(plain) and request.key(request.trace()) == again.request_key


@in_one_of(3)
def test_given_tiles_are_compiled_and_lacking_ones_are_said(
    plain: CompileReport, compile_it: Callable[..., CompileReport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = _products(_log(plain))
    given = _log(plain).model_copy(update={"choices": (_faster(first),)})
    (tmp_path / "log.json").write_text(given.model_dump_json())
    report = compile_it(tuning_log=str(tmp_path / "log.json"))

    found = {choice.key: choice for choice in _log(report).choices}
    assert found[first.key] == _faster(first).model_copy(update={"source": "given"})
    assert [found[one.key] for one in rest] == [one.model_copy(update=LACKS) for one in rest]

    # All but the region of that product is as it was.
    (key,) = _executables(report) - _executables(plain)
    assert json.loads((report.output / EXECUTABLES).read_text())["documents"][key]["tiles"] == [
        _faster(first).decides()
    ]
    launches = json.loads((report.output / "exe" / "sm_90" / key / "launches.json").read_text())["launches"]
    assert [launch["warps"] for launch in launches] == [_faster(first).tiles["warps"]]

    assert run(INGOT, ["inspect", str(report.output), "--choices"]) == 0
    shown = capsys.readouterr().out
    assert "12.5" in shown and "given" in shown and "heuristic" in shown
    stored = json.loads((report.output / "choices.json").read_text())["decode-1"]["tiles"]
    assert sorted(one["source"] for tiles in stored.values() for one in tiles)[0] == "given"


@in_one_of(3)
def test_a_log_given_to_a_compile_for_several_targets_is_of_its_own_target(
    plain: CompileReport, compile_it: Callable[..., CompileReport], tmp_path: Path
) -> None:
    first, *_ = _products(_log(plain))
    given = _log(plain).model_copy(update={"choices": (_faster(first),)})
    (tmp_path / "log.json").write_text(given.model_dump_json())
    report = compile_it(target="cpu,sm_90", tuning_log=str(tmp_path / "log.json"))
    variant = report.variants["sm_90"]
    found = {choice.key: choice for choice in _log(variant).choices}
    assert found[first.key] == _faster(first).model_copy(update={"source": "given"})
    (key,) = _executables(variant) - _executables(plain)
    launches = json.loads((variant.output / "exe" / "sm_90" / key / "launches.json").read_text())["launches"]
    assert [launch["warps"] for launch in launches] == [_faster(first).tiles["warps"]]
    # The fat artifact is a log for each of its targets.
    again = compile_it(tuning_log=report.output)
    assert _executables(again) == _executables(variant)


@in_one_of(3)
def test_what_no_log_has_is_timed_and_the_log_reproduces_it(
    plain: CompileReport, compile_it: Callable[..., CompileReport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Choice] = []

    def timer(backend: str, choice: Choice, seconds: float) -> Choice:
        asked.append(choice)
        return _faster(choice)

    monkeypatch.setattr(ingot.compile.compiled_target, "Tuner", partial(Tuner, measure=timer))
    monkeypatch.setattr("ingot.compile.timing.tuner.cache_folder", lambda kind: tmp_path)
    steps: list[tuple[str, int, int]] = []
    given = _log(plain).model_copy(update={"choices": tuple(_products(_log(plain))[1:])})
    tuned = compile_it(tune=True, tuning_log=given.model_dump(), progress=lambda *step: steps.append(step))
    lacking = [choice for choice in _log(plain).choices if choice.key not in {one.key for one in given.choices}]
    assert {choice.kernel for choice in lacking} == {"linear", "decode_attention"} and len(lacking) == 2
    assert sorted(choice.key for choice in asked) == sorted(choice.key for choice in lacking)
    timing = "timing tile sizes"
    assert [step for step in steps if step[0] == timing] == [(timing, 0, 2), (timing, 1, 2)]
    assert all(_faster(choice).model_copy(update=LACKS) in _log(tuned).choices for choice in asked)
    again = compile_it(tuning_log=tuned.output / TUNING)
    assert _executables(again) == _executables(tuned) and again.cached_executables == again.distinct_regions
    assert len(_executables(tuned) - _executables(plain)) == 2


def test_timing_needs_the_gpu_that_is_compiled_for(
    compile_it: Callable[..., CompileReport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ingot.compile.timing.tuner.cache_folder", lambda kind: tmp_path)
    with pytest.raises(TargetError, match=f"tile sizes for sm_90 cannot be timed: {NO_GPU}") as caught:
        compile_it(tune=True)
    assert "linear(columns=210, depth=75, tokens=1, " in caught.value.where and "3 more" in caught.value.where
    assert "--tuning-log" in caught.value.hint
    with pytest.raises(TargetError, match="no backend for cpu on this machine has tile sizes to time"):
        compile_it(tune=True, target="cpu", backend="reference")


# --- logs that are refused --------------------------------------------------------------------------------------------

AROUND = {"gated": False, "norm": False, "residual": False}
PROBLEM = {"columns": 64, "depth": 32, "tokens": 16, "dtype": "bf16", "result": "bf16", **AROUND}
TILES = {"block_n": 64, "block_k": 64, "splits": 1, "warps": 4, "stages": 3}
CHOICE = {"kernel": "linear", "problem": PROBLEM, "tiles": TILES, "source": "measured"}
LOG = {"version": 2, "target": "sm_90", "cores": 132, "choices": [CHOICE]}


def _with(**changes: Any) -> dict[str, Any]:
    return {**LOG, "choices": [{**CHOICE, **changes}]}


@pytest.mark.parametrize(
    ("log", "error", "what"),
    [
        ({**LOG, "target": "sm_100"}, TargetError, "the tuning log is for sm_100, and this compile for sm_90"),
        ({**LOG, "version": 1}, OptionError, "malformed: version: "),
        ({**LOG, "choices": [CHOICE, CHOICE]}, OptionError, r"two choices for linear\(columns=64"),
        (_with(microseconds=0.0), OptionError, r"malformed: choices.0.microseconds: "),
        (_with(source="guessed"), OptionError, r"malformed: choices.0.source: "),
        (_with(kernel="convolution"), OptionError, "is for an unknown kernel"),
        (_with(problem={**PROBLEM, "batch": 3}), OptionError, "does not describe a matmul: "),
        (_with(problem={**PROBLEM, "tokens": 8}), OptionError, "does not describe a matmul: "),
        (_with(problem={**PROBLEM, "dtype": "i4"}), OptionError, "does not describe a matmul: "),
        (_with(kernel="decode_attention"), OptionError, "does not describe decode attention: "),
        (_with(tiles={**TILES, "depth": 3}), OptionError, "has the tile sizes block_n, block_k, splits"),
        (_with(tiles={"block_n": 64, "block_k": 64}), OptionError, "has the tile sizes block_n, block_k"),
        (_with(tiles={**TILES, "block_n": 48}), OptionError, "has block_n 48"),
        (_with(tiles={**TILES, "splits": 0}), OptionError, "has splits 0"),
        (_with(tiles={**TILES, "warps": 64}), OptionError, "has warps 64"),
        (_with(tiles={**TILES, "block_n": 1024, "block_k": 1024}), OptionError, "has tiles of block_n=1024"),
        (_with(tiles={**TILES, "block_k": 8}), OptionError, "has block_k 8"),
        (_with(problem={**PROBLEM, "tokens": 1}), OptionError, "has the tile sizes block_n, block_k, splits"),
        ("missing.json", OptionError, "the tuning log cannot be read: No such file"),
        (__file__, OptionError, "the tuning log is not JSON"),
        (3, OptionError, "the tuning log is malformed: "),
    ],
)
def test_a_log_that_is_no_log(checkpoint: Callable[[str], Path], log: Any, error: type[IngotError], what: str) -> None:
    with pytest.raises(error, match=what) as caught:
        Request.read(checkpoint(NAME), **OPTIONS, tuning_log=log)
    assert caught.value.where and caught.value.expected
    if log != __file__ and isinstance(log, dict):
        assert Request.read(checkpoint(NAME), **OPTIONS, tuning_log=LOG).tuning_log is not None
