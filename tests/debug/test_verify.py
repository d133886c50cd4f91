"""A golden run repeats, and what is not as it was when the artifact was compiled is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resign import Edit, edit_json, sign

from ingot import compile_model
from ingot.compile import golden as golden_module
from ingot.compile.golden import read_golden, replay
from ingot.debug.verification import Promise, Verification
from ingot.debug.verify import verify
from ingot.ir.artifact.manifest import GOLDEN
from ingot.ir.errors import ArtifactError, MismatchError
from ingot.ir.machine.target import Target
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import load_artifact

pytestmark = pytest.mark.one_in_file(3)

# The artifacts that the parity tests compile too, in the worker that has them.
reference = pytest.mark.xdist_group("parity-llama-plain")
inductor = pytest.mark.xdist_group("parity-llama-biased")

Artifacts = Callable[..., Path]


@pytest.fixture
def plain(artifact: Artifacts, tmp_path: Path) -> Path:
    """A copy of an artifact of the reference backend, to be changed."""
    return Path(shutil.copytree(artifact("llama-plain", backend="reference"), tmp_path / "plain.ingot"))


@pytest.fixture
def compiled(artifact: Artifacts, tmp_path: Path) -> Path:
    """A copy of an artifact with executables, to be changed."""
    return Path(shutil.copytree(artifact("llama-biased", backend="inductor"), tmp_path / "compiled.ingot"))


def edit_golden(artifact: Path, edit: Edit) -> None:
    edit_json(artifact, GOLDEN, edit)


def accept_files(artifact: Path) -> None:
    """Let the golden run say that it was recorded with the files that are there now."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    now = {entry["path"]: entry for entry in manifest["files"]}
    edit_golden(artifact, lambda run: run.update(files=[now[entry["path"]] for entry in run["files"]]))


def flip(artifact: Path, relpath: str, position: int, bit: int = 1) -> None:
    """Change one bit of a file, which must not be mapped."""
    file = artifact / relpath
    data = bytearray(file.read_bytes())
    data[position] ^= bit
    file.unlink()
    file.write_bytes(data)


def weight_place(artifact: Path, name: str) -> tuple[str, int]:
    """The file of a weight, and the offset of the byte with the sign and exponent of its first number, float32."""
    entry = json.loads((artifact / "weights.json").read_text())[name]
    assert entry["dtype"] == "f32"
    return entry["file"], entry["offset"] + 3


def assert_repeats(found: Verification) -> None:
    assert found.holds and found.error() is None and not found.changed and found.first is None
    assert found.promise is Promise.BITWISE
    for result in found.results:
        assert result.positions == result.bitwise_equal == result.tokens_equal > 0
        assert result.max_error == result.allowed == 0


# --- it repeats -----------------------------------------------------------------------------------------------------


@reference
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["plain", "deterministic"])
def test_twice_in_a_row(artifact: Artifacts, options: dict[str, Any]) -> None:
    folder = artifact("llama-plain", backend="reference", **options)
    for _ in range(2):
        assert_repeats(verify(folder))


@inductor
def test_twice_in_a_row_with_executables(artifact: Artifacts) -> None:
    for _ in range(2):
        found = verify(artifact("llama-biased", backend="inductor"))
        assert_repeats(found)
        assert {result.bucket for result in found.results} == {"decode", "extend"}


@reference
def test_the_logits_are_those_of_the_executor(artifact: Artifacts) -> None:
    """What was recorded, against the logits of each request fed alone and whole."""
    from serve_artifact import teacher_forced_artifact

    folder = artifact("llama-plain", backend="reference")
    run = read_golden(open_artifact(folder))
    logits = [teacher_forced_artifact(str(folder), [request], None)[0] for request in run.requests]
    (entry,) = run.entries.values()
    seen = set()
    for number, step in enumerate(entry.steps):
        for place, row in zip(run.places(number), step.rows, strict=True):
            expected = logits[place[0]][place[1]]
            assert row.token == int(expected.argmax()) == row.top[0][0]
            values = torch.tensor([value for _, value in row.top])
            torch.testing.assert_close(values, expected.topk(golden_module.TOP).values)
            seen.add(place)
    assert seen == {(index, place) for index, request in enumerate(run.requests) for place in range(len(request))}


@reference
def test_threads_are_those_of_the_recording_and_come_back(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_golden(plain, lambda run: run["machine"].update(threads=3))
    during: list[int] = []

    def watched(*args: Any) -> Any:
        during.append(torch.get_num_threads())
        return replay(*args)

    monkeypatch.setattr("ingot.debug.verify.replay", watched)
    before = torch.get_num_threads()
    assert verify(plain).holds
    assert during == [3] and torch.get_num_threads() == before


# --- what is not as it was ------------------------------------------------------------------------------------------


def mismatch(artifact: Path) -> Verification:
    found = verify(artifact)
    error = found.error()
    assert isinstance(error, MismatchError) and error.exit_code == 2 and not found.holds
    assert f"ingot bisect {artifact}" in str(error)
    return found


@reference
def test_a_changed_weight_byte(plain: Path) -> None:
    file, place = weight_place(plain, "layers.0.attention.o.weight")
    flip(plain, file, place, 0x40)
    with pytest.raises(ArtifactError, match=file):  # the digests alone tell
        verify(plain)
    sign(plain, file)
    found = mismatch(plain)
    assert found.changed == (f"{file}: changed",) and found.wrong > 0
    # The numbers alone tell too, and where.
    accept_files(plain)
    found = mismatch(plain)
    assert not found.changed and found.first is not None and found.first_token is not None
    text = str(found.error())
    assert "step 0 (bucket class any), request 0, position 0: error" in text
    token = found.first_token
    assert token.token != token.recorded_token and f"{token.token}, recorded {token.recorded_token}: step" in text


@reference
def test_a_weight_that_no_request_reads(plain: Path) -> None:
    run = read_golden(open_artifact(plain))
    unread = min(set(range(300)) - {token for request in run.requests for token in request})
    index = json.loads((plain / "weights.json").read_text())["embed.weight"]
    file, width = index["file"], index["shape"][1] * 4
    flip(plain, file, index["offset"] + unread * width)
    sign(plain, file)
    found = mismatch(plain)
    assert found.changed == (f"{file}: changed",)


@reference
def test_a_changed_backend_that_computes_the_same_bits(plain: Path) -> None:
    number = 0

    def edit(plan: Any) -> None:
        nonlocal number
        instructions = plan["positions"]["all"]["plans"]["main"]["buckets"][0]["instructions"]
        number = next(i for i, one in enumerate(instructions) if one["target"] == "ingot.embedding")
        instructions[number]["backend"] = "rowwise"

    edit_json(plain, "plan.json", edit)
    found = mismatch(plain)
    backend = f"main, any, instruction {number} (ingot.embedding): computed by rowwise, before by reference"
    assert found.changed == ("plan.json: changed", backend) and found.wrong == 0
    assert "all 47 positions are as recorded" in str(found.error())
    accept_files(plain)
    assert mismatch(plain).changed == (backend,)


@inductor
def test_a_changed_kernel_library(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = json.loads((compiled / "plan.json").read_text())["positions"]["all"]["plans"]["main"]
    folder = compiled / "exe" / "cpu" / plan["libraries"]["cpu"]["id"]
    kernels = folder / plan["libraries"]["cpu"]["files"][0]
    relpath = kernels.relative_to(compiled).as_posix()
    data = kernels.read_bytes()
    kernels.unlink()
    kernels.write_bytes(data + b"\0")  # it would still load, and compute the same
    with pytest.raises(ArtifactError, match=relpath):
        verify(compiled)
    sign(compiled, relpath)
    monkeypatch.setattr("ingot.debug.verify.bind", None)  # nothing of it is opened
    found = mismatch(compiled)
    assert found.changed == (f"{relpath}: changed",) and not found.results
    assert "it failed: 1 changed files hold native code" in str(found.error())


@reference
def test_a_changed_plan_that_cannot_be_run(plain: Path) -> None:
    def edit(plan: Any) -> None:
        plan["positions"]["all"]["plans"]["main"]["buckets"][0]["instructions"][2]["backend"] = "absent"

    edit_json(plain, "plan.json", edit)
    found = mismatch(plain)
    assert found.changed == ("plan.json: changed",)
    assert "it failed: the plan cannot be run: the backend is 'absent'" in str(found.error())


@inductor
def test_a_region_moved_to_another_backend(compiled: Path) -> None:
    def edit(plan: Any) -> None:
        one = plan["positions"]["all"]["plans"]["main"]
        decode = next(bucket for bucket in one["buckets"] if bucket["bucket"]["name"] == "decode")
        for instruction in decode["instructions"]:
            if instruction["backend"] == "cpu" and instruction["target"] == "ingot.linear":
                instruction["backend"] = "reference"
                return

    edit_json(compiled, "plan.json", edit)
    found = mismatch(compiled)
    assert len(found.changed) == 2 and "(ingot.linear): computed by reference, before by cpu" in found.changed[1]


# --- on another processor -------------------------------------------------------------------------------------------


def elsewhere(run: Any) -> None:
    run["machine"]["processor"] = "another"


def blur(run: Any, by: float) -> None:
    """As another machine would have recorded it: other bits, and each logit off by up to `by`."""
    for step in run["entries"]["main"]["steps"]:
        for row in step["rows"]:
            row["digest"] = "0" * 64
            row["top"] = [[index, value + by * (-1) ** index] for index, value in row["top"]]


@reference
def test_elsewhere_logits_may_differ_by_the_tolerance(plain: Path) -> None:
    edit_golden(plain, elsewhere)
    found = verify(plain)
    assert found.holds and found.promise is Promise.TOLERANCE and found.results[0].bitwise_equal == 47
    # float32: 1e-5 and 1e-4 of the largest logit (ir/numerics/tolerances.py); the logits are of size 2 to 10.
    edit_golden(plain, lambda run: blur(run, 1e-4))
    found = verify(plain)
    assert found.holds and found.results[0].bitwise_equal == 0
    assert found.results[0].max_error == pytest.approx(1e-4, rel=0.1)
    assert 2e-4 < found.results[0].allowed < 1.1e-3
    edit_golden(plain, lambda run: blur(run, 2e-3))
    found = mismatch(plain)
    assert found.wrong == 47 and "within the tolerance" in str(found.error())


@reference
def test_elsewhere_a_token_may_differ_where_two_are_as_good(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_golden(plain, elsewhere)

    def another_token(run: Any) -> None:
        row = run["entries"]["main"]["steps"][0]["rows"][3]
        row["token"] = row["top"][1][0]

    edit_golden(plain, another_token)
    found = mismatch(plain)  # the bits are equal, so the token must be
    assert found.wrong == 1 and found.first_token == found.first
    edit_golden(plain, lambda run: blur(run, 1e-4))
    found = mismatch(plain)  # and these two are not as good as equal
    assert found.wrong == 1 and found.first is not None and found.first.position == 3
    monkeypatch.setattr("ingot.debug.verify._is_tie", lambda *args: True)
    assert verify(plain).holds


@reference
def test_other_bits_here_are_a_mismatch_however_small(plain: Path) -> None:
    edit_golden(plain, lambda run: blur(run, 0.0))
    found = mismatch(plain)
    assert found.wrong == 47 and found.results[0].max_error == 0


@reference
def test_numbers_that_are_not_finite(plain: Path) -> None:
    """Recorded as words; a word is equal to itself only."""
    edit_golden(plain, elsewhere)

    def edit(run: Any) -> None:
        row = run["entries"]["main"]["steps"][0]["rows"][0]
        row["digest"], row["top"][0][1] = "0" * 64, "inf"

    edit_golden(plain, edit)
    found = mismatch(plain)
    assert found.wrong == 1 and found.first is not None and found.first.error == float("inf")
    assert golden_module._row(torch.tensor([1.0, float("nan"), float("-inf")]), -1).top == (
        (1, "nan"),
        (0, 1.0),
        (2, "-inf"),
    )


# --- golden runs that are none --------------------------------------------------------------------------------------


@reference
def test_a_missing_golden_run(plain: Path) -> None:
    (plain / GOLDEN).unlink()
    with pytest.raises(ArtifactError, match=GOLDEN):
        verify(plain)
    sign(plain)
    with pytest.raises(ArtifactError, match="no golden run"):
        verify(plain)
    load_artifact(plain)  # serving does not need it


def test_a_compile_where_there_is_no_memory_to_serve(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detected = Target.detect("cpu")
    monkeypatch.setattr(Target, "detect", lambda device: detected.model_copy(update={"memory": 1 << 20}))
    report = compile_model(checkpoint("llama-plain"), tmp_path / "a.ingot", backend="reference", max_seq_len=64)
    assert "do not fit into memory" in report.no_golden_run
    assert not (report.output / GOLDEN).exists()


@reference
def test_a_changed_golden_run(plain: Path) -> None:
    flip(plain, GOLDEN, 100)
    with pytest.raises(ArtifactError, match=f"{GOLDEN} does not match its checksum"):
        verify(plain)


def rows(run: Any) -> Any:
    return run["entries"]["main"]["steps"][0]["rows"]


MALFORMED: dict[str, tuple[Edit, str]] = {
    "an unknown field": (lambda run: run.update(novel=1), "novel"),
    "no machine": (lambda run: run.pop("machine"), "machine"),
    "no thread": (lambda run: run["machine"].update(threads=0), "threads"),
    "a token of a request too large": (lambda run: run["requests"][0].__setitem__(0, 10**6), "token ids reach 1000001"),
    "a token sampled too large": (lambda run: rows(run)[0].update(token=10**6), "token ids reach 1000001"),
    "a top token too large": (lambda run: rows(run)[0]["top"][0].__setitem__(0, 10**6), "token ids reach"),
    "a token below 0": (lambda run: run["requests"][0].__setitem__(0, -1), "requests.0.0"),
    "no request": (lambda run: run.update(requests=[]), "requests"),
    "an empty step": (lambda run: run["schedule"].__setitem__(0, []), "step 0 has"),
    "a step of an unknown request": (lambda run: run["schedule"][0][0].__setitem__(0, 9), "step 0 has"),
    "a step that feeds more": (lambda run: run["schedule"][0][0].__setitem__(1, 99), "the steps have"),
    "a row less": (lambda run: rows(run).pop(), "rows for steps"),
    "no top logits": (lambda run: rows(run)[0].update(top=[]), "top"),
    "a digest malformed": (lambda run: rows(run)[0].update(digest="AB"), "digest"),
    "a logit that is a word": (lambda run: rows(run)[0]["top"][0].__setitem__(1, "many"), "top"),
    "another entry": (lambda run: run["entries"].update(other=run["entries"].pop("main")), "entry 'other'"),
    "a file outside": (lambda run: run["files"][0].update(path="../x"), "is refused"),
}


@reference
@pytest.mark.parametrize("case", MALFORMED)
def test_a_golden_run_that_is_malformed(plain: Path, case: str) -> None:
    edit, message = MALFORMED[case]
    edit_golden(plain, edit)
    with pytest.raises(ArtifactError, match=message) as caught:
        verify(plain)
    assert not isinstance(caught.value, MismatchError) and caught.value.exit_code == 2


@reference
@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff"])
def test_a_golden_run_that_is_not_json(plain: Path, data: bytes) -> None:
    (plain / GOLDEN).write_bytes(data)
    sign(plain)
    with pytest.raises(ArtifactError, match=f"{GOLDEN} is malformed"):
        verify(plain)


@reference
def test_limits_below_what_the_golden_run_feeds(plain: Path) -> None:
    def longer(run: Any) -> None:
        run["requests"] = [[1] * 161]
        run["schedule"] = [[[0, 161]]]
        step = run["entries"]["main"]["steps"][0]
        run["entries"]["main"]["steps"] = [{**step, "rows": [step["rows"][0]] * 161}]

    edit_golden(plain, longer)
    with pytest.raises(ArtifactError, match="tokens of a request reach 161"):
        verify(plain)
