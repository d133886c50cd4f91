"""Compiling twice gives the same bytes; every input has its place in an identity, and nothing else has."""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn, in_one_of
from safetensors.torch import load_file, save_file
from staged import staged, traced
from tiny import TINY

import ingot.compile.identity
from ingot import compile_model
from ingot.backends.inductor.emit import Inductor
from ingot.compile.compile_report import CompileReport
from ingot.compile.driver import _few_collections
from ingot.compile.identity import exe_key
from ingot.compile.recorded_request import recorded_request
from ingot.compile.request import Request
from ingot.ir.errors import CheckpointError
from ingot.ir.machine.target import Target
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.numerics.tolerances import compare
from ingot.ir.parse import parse_type
from ingot.ir.program import Region
from ingot.passes.pipeline import OPTIONAL
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import load_artifact

NAME = "llama-biased"
OPTIONS: dict[str, Any] = {
    "max_batch": 8,
    "max_tokens": 1024,
    "max_seq_len": 160,
    "jobs": 1,
}  # those of the `artifact` fixture
TOKENIZER_FILES = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": 2}'}


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may change, with tokenizer files (which compiling only copies)."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(NAME), folder)
    for name, text in TOKENIZER_FILES.items():
        (folder / name).write_text(text)
    return folder


_SCRIPT = """
import json, sys
import ingot.compile.identity
from ingot import compile_model
checkpoint, output, options = json.loads(sys.argv[1])
report = compile_model(checkpoint, output, **options)
print(json.dumps([report.request_key, report.build_id, report.cached_executables, report.distinct_regions]))
"""


def _compile_elsewhere(checkpoint: Path, output: Path, options: Mapping[str, Any], hash_seed: str) -> list[Any]:
    """[request_key, build_id, cached executables, distinct ones] of a compile in a new process and working folder."""
    output.parent.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps([str(checkpoint), str(output), options])],
        capture_output=True,
        text=True,
        cwd=output.parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},  # the order of a set must not show
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _assert_same_artifact(one: Path, other: Path) -> None:
    left, right = _files(one), _files(other)
    assert left.keys() == right.keys()
    differing = {name for name in left if left[name] != right[name]}
    # How long it took stands outside every identity; the checksums cover it.
    assert differing <= {"timings.json", "manifest.sha256"}, "the golden run among the equal ones, on one machine"
    for name in ("program.ir", "plan.json", "weights.json", "choices.json", "trace/00-traced.ir", "trace/passes.json"):
        assert name in left
    assert any(name.startswith("weights/") for name in left)


@in_one_of(3)
def test_the_same_request_gives_the_same_bytes(copied: Path, tmp_path: Path) -> None:
    """Two folders, two processes with two orders of hashing: the whole artifact is the same."""
    options = {**OPTIONS, "backend": "reference"}
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(copied, moved)
    here = compile_model(copied, tmp_path / "one.ingot", **options)
    there = _compile_elsewhere(moved, tmp_path / "deeper" / "another-name.ingot", options, "4242")
    assert there[:2] == [here.request_key, here.build_id]
    _assert_same_artifact(here.output, tmp_path / "deeper" / "another-name.ingot")


@pytest.mark.xdist_group(f"parity-{NAME}")
@in_one_of(3)
def test_executables_from_one_cache_give_the_same_build(
    artifact: Callable[..., Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With compiled regions: found in the cache they are the same files, so the build is the same."""
    first = artifact(NAME, backend="inductor")
    output = tmp_path / "again" / "other.ingot"
    key, build_id, cached, distinct = _compile_elsewhere(
        checkpoint(NAME), output, {**OPTIONS, "backend": "inductor"}, "7"
    )
    manifest = json.loads((first / "manifest.json").read_text())
    assert key == manifest["request_key"]
    assert cached == distinct == len(manifest["exe_keys"]) - 1 > 0, "one key is that of the library of kernels"
    _assert_same_artifact(first, output)
    assert (output / "manifest.sha256").read_text().split()[0] == build_id
    assert (first / "manifest.sha256").read_text().split()[0] == build_id


# Identities.


def _key(checkpoint: Path, **options: Any) -> str:
    request = Request.read(checkpoint, **{"max_batch": 8, "max_tokens": 64, "backend": "reference", **options})
    return request.key(request.trace())


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _flip_a_weight(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


CHANGED_FILES: dict[str, Callable[[Path], object]] = {
    "one bit of a weight": _flip_a_weight,
    "a tokenizer file": lambda folder: (folder / "tokenizer.json").write_text('{"a": 1}'),
    "a tokenizer file less": lambda folder: (folder / "tokenizer.json").unlink(),
    "a tokenizer file more": lambda folder: (folder / "merges.txt").write_text(""),
    "the generation config": lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 3}'),
    "the epsilon of norms": lambda folder: _edit_config(folder, rms_norm_eps=0.022),
    "the base of rope": lambda folder: _edit_config(folder, rope_theta=3002.0),
    "the longest sequence": lambda folder: _edit_config(folder, max_position_embeddings=161),
    "the dtype": lambda folder: _edit_config(folder, torch_dtype="bfloat16"),
    "the end of a text": lambda folder: _edit_config(folder, eos_token_id=5),
}


@pytest.mark.parametrize("what", CHANGED_FILES)
def test_request_key_changes_with_the_checkpoint(copied: Path, what: str) -> None:
    before = _key(copied)
    CHANGED_FILES[what](copied)
    assert _key(copied) != before


def test_request_key_changes_with_each_option(copied: Path) -> None:
    keys = {
        what: _key(copied, **options)
        for what, options in {
            "default": {},
            "max_seq_len": {"max_seq_len": 159},
            "max_batch": {"max_batch": 9},
            "max_tokens": {"max_tokens": 65},
            "dtype": {"dtype": "bfloat16"},
            "half": {"dtype": "float16"},
            "deterministic": {"deterministic": True},
            "backend": {"backend": "inductor"},
            "pass option": {"passes": "default,insert-paged-kv{page_size=32}"},
            **{f"without {name}": {"passes": f"default,-{name}"} for name in OPTIONAL},
        }.items()
    }
    assert len(set(keys.values())) == len(keys), keys


def test_request_key_stays_where_nothing_is_decided(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key(copied)
    longest = Request.read(copied).spec.max_position
    assert _key(copied, dtype="float32", max_seq_len=longest, passes="default,insert-paged-kv{page_size=16}") == before
    assert _key(copied, backend="auto") == _key(copied, backend="inductor"), "auto is inductor on a CPU"
    (copied / "README.md").write_text("about this model")
    config = json.loads((copied / "config.json").read_text())
    # Nothing asks for a field like that, whatever it holds.
    (copied / "config.json").write_text(json.dumps({**config, "_name_or_path": [math.inf]}, indent=7))
    monkeypatch.chdir(copied.parent)
    assert _key(Path("checkpoint")) == before


def test_request_key_changes_with_sources_toolchain_and_target(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = (Request.read(copied, backend=backend) for backend in ("reference", "inductor"))
    model = plain.trace()
    before, with_compiler = plain.key(model), compiled.key(model)
    with monkeypatch.context() as patch:
        digests = ingot.compile.identity._digests
        patch.setattr(ingot.compile.identity, "_digests", lambda files: digests(sorted(files)[1:]))
        assert plain.key(model) != before
    with monkeypatch.context() as patch:
        patch.setattr(Inductor, "toolchain", lambda self: {"torch": "0", "c++": "other"})
        assert plain.key(model) == before, "the reference compiles nothing"
        assert compiled.key(model) != with_compiler
    other = plain.target.model_copy(update={"features": ("other",)})
    assert replace(plain, target=other).key(model) != before
    larger = plain.target.model_copy(update={"memory": 1, "cores": 99})
    assert replace(plain, target=larger).key(model) == before
    assert (plain.key(model), compiled.key(model)) == (before, with_compiler)


def _regions(config: Mapping[str, Any]) -> list[Region]:
    return list(staged(traced(config))[1].programs["any"].regions.values())


def _exe_keys(regions: Sequence[Region], target: Target | None = None) -> set[str]:
    return {exe_key(region, Inductor(), target or Target.detect("cpu")) for region in regions}


def test_exe_key_is_free_of_weights_and_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY[NAME].config
    regions = _regions(config)
    base = _exe_keys(regions)
    assert len(base) == 3
    # How often layers repeat, which table rope reads and what ends a text are no part of the code.
    assert _exe_keys(_regions({**config, "num_hidden_layers": 5})) == base
    assert _exe_keys(_regions({**config, "eos_token_id": 7, "rope_theta": 11.0, "rope_scaling": None})) == base
    for changes in ({"rms_norm_eps": 0.5}, {"torch_dtype": "bfloat16"}, {"intermediate_size": 132}):
        assert _exe_keys(_regions({**config, **changes})) != base
    target = Target.detect("cpu")
    assert _exe_keys(regions, target.model_copy(update={"memory": 1, "cores": 1})) == base
    assert not _exe_keys(regions, target.model_copy(update={"features": ("other",)})) & base
    assert not _exe_keys(regions, target.model_copy(update={"versions": {"torch": "0"}})) & base
    source = tmp_path / "source.py"
    monkeypatch.setattr(Inductor, "sources", lambda self: (source,))
    for text in ("x = 1", "x = 2"):
        source.write_text(text)
        found = _exe_keys(regions)
        assert not found & base
        base = found
    monkeypatch.setattr(Inductor, "toolchain", lambda self: {"c++": "other"})
    assert not _exe_keys(regions) & base


def test_two_fine_tunes_share_their_executables(copied: Path, tmp_path: Path) -> None:
    """Other weights: another request and another build, of the same plan."""
    options = {**OPTIONS, "backend": "reference"}
    first = compile_model(copied, tmp_path / "first.ingot", **options)
    for file in copied.glob("*.safetensors"):
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    second = compile_model(copied, tmp_path / "second.ingot", **options)
    assert first.request_key != second.request_key and first.build_id != second.build_id
    for name in ("plan.json", "program.ir", "weights.json", "choices.json"):
        assert (first.output / name).read_bytes() == (second.output / name).read_bytes()


# Every way through the pipeline computes the same model.


def _logits(report: CompileReport, page_size: int) -> torch.Tensor:
    loaded = load_artifact(report.output)
    requests = [prompt for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33)]
    rows = teacher_forced(
        {name: parse_type(text) for name, text in loaded.plan.inputs.items()},
        lambda inputs: loaded.executor.launch(inputs).outputs,
        requests,
        chunk=7,
        pages=loaded.num_pages,
        page_size=page_size,
        seed=3,
    )
    return torch.cat(rows)


@pytest.fixture(scope="module")
def default_logits(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    output = tmp_path_factory.mktemp("default") / "default.ingot"
    return _logits(compile_model(checkpoint(NAME), output, **OPTIONS, backend="reference"), 16)


VARIANTS = {
    **{f"without {name}": {"passes": f"default,-{name}"} for name in sorted(OPTIONAL)},
    "without all of these": {"passes": ",".join(["default", *(f"-{name}" for name in sorted(OPTIONAL))])},
    "small pages": {"passes": "default,insert-paged-kv{page_size=4}"},
    "large pages": {"passes": "default,insert-paged-kv{page_size=64}"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("what", drawn(5, VARIANTS))
def test_every_pipeline_computes_the_same_model(
    what: str, checkpoint: Callable[[str], Path], default_logits: torch.Tensor, tmp_path: Path
) -> None:
    report = compile_model(
        checkpoint(NAME), tmp_path / "variant.ingot", **{**OPTIONS, "backend": "reference", **VARIANTS[what]}
    )
    page_size = {"small pages": 4, "large pages": 64}.get(what, 16)
    # Ten times the tolerance of one op: sums in another order add up over the layers.
    assert compare(_logits(report, page_size), default_logits, torch.float32, factor=10) is None


def test_without_regions_everything_runs_by_the_reference(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Also when a region compiler was asked for: it compiles no single calls, and the report says who computes."""
    report = compile_model(
        checkpoint(NAME), tmp_path / "a.ingot", **OPTIONS, backend="inductor", passes="default,-form-regions"
    )
    assert report.nodes_per_backend.keys() == {"cpu", "reference"} and report.distinct_regions == 0
    load_artifact(report.output)


def test_the_report_is_what_the_artifact_holds(copied: Path, tmp_path: Path) -> None:
    report = compile_model(copied, tmp_path / "a.ingot", **OPTIONS, backend="reference")
    manifest = json.loads((report.output / "manifest.json").read_text())
    plan = json.loads((report.output / "plan.json").read_text())
    assert manifest["request_key"] == report.request_key and manifest["exe_keys"] == []
    assert (report.regions, report.distinct_regions, report.cached_executables) == (0, 0, 0)
    bucket = plan["positions"]["all"]["plans"]["main"]["buckets"][0]
    assert report.nodes_per_backend == {"reference": len(bucket["instructions"])}
    assert report.artifact_bytes == sum(len(data) for data in _files(report.output).values())
    # The tied head and the embedding are one tensor.
    weights = json.loads((report.output / "weights.json").read_text())
    sizes = [torch.tensor(entry["shape"]).prod().item() * 4 for entry in weights.values() if "file" in entry]
    assert report.weight_bytes == sum(sizes)
    assert sorted(path.name for path in (report.output / "tokenizer").iterdir()) == sorted(TOKENIZER_FILES)
    names = sorted(path.name for path in (report.output / "trace").glob("*.ir"))
    assert names == ["00-traced.ir"], "everything else is smaller as a difference"
    deltas = sorted(path.name for path in (report.output / "trace").glob("*.delta"))
    assert deltas[0] == "01-normalize.delta" and deltas[-1] == "21-make-plan@any.delta" and len(deltas) == 22
    timings = json.loads((report.output / "timings.json").read_text())
    assert timings["phases"].keys() <= report.seconds.keys() and len(timings["passes"]) == 21


def test_a_request_is_read_back_from_its_artifact(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama-plain")
    given = {"backend": "reference", "max_seq_len": 64, "max_batch": 4, "passes": "default,-cse", "dtype": "bfloat16"}
    compile_model(folder, tmp_path / "a.ingot", **given)
    artifact = open_artifact(tmp_path / "a.ingot")
    again = recorded_request(artifact)
    assert again.key(again.trace()) == artifact.manifest.request_key
    assert again.options == Request.read(folder, **given).options
    (tmp_path / "a.ingot" / "timings.json").unlink()
    with pytest.raises(CheckpointError, match="is not there"):
        recorded_request(artifact)
    assert recorded_request(artifact, folder).options == again.options


def test_garbage_is_collected_behind_the_programs_and_as_before() -> None:
    gc.unfreeze()  # what pytest collected, and what other tests of this process served with
    with _few_collections() as go_on:
        assert not gc.isenabled()
        go_on()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(KeyError), _few_collections():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:
        with _few_collections() as go_on:
            go_on()
            assert not gc.isenabled(), "the caller wants none"
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.freeze()
