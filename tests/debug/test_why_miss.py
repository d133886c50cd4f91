"""Why two compiles are not one: each input changed by itself is named, and nothing else is."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from resign import sign
from staged import staged, traced
from tiny import CHECKPOINTS

import ingot.backends.cpu.emit
import ingot.backends.inductor.emit
import ingot.compile.identity
from ingot import compile_model, open_artifact
from ingot.backends.inductor.emit import Inductor
from ingot.compile.identity import exe_document
from ingot.compile.request import Request
from ingot.debug.identity_diff import Document, changes
from ingot.debug.why_miss import (
    executables_not_shared,
    first_difference,
    identity_of,
    why_miss,
    why_requests_differ,
)
from ingot.ir.artifact import digest
from ingot.ir.artifact.digest import digest_json
from ingot.ir.errors import ArtifactError
from ingot.ir.machine.target import Target
from ingot.ir.program import Region

pytestmark = pytest.mark.one_in_file(3)

NAME = "llama-biased"
OPTIONS: dict[str, Any] = {"max_batch": 8, "max_tokens": 64, "backend": "reference"}
FILES = {"tokenizer.json": "{}", "generation_config.json": "{}", "chat_template.jinja": "{{ messages }}"}


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    shutil.copytree(checkpoint(NAME), tmp_path / "checkpoint")
    for name, text in FILES.items():
        (tmp_path / "checkpoint" / name).write_text(text)
    return tmp_path / "checkpoint"


def document(folder: Path, **options: Any) -> Document:
    """What a compile would ask for."""
    request = Request.read(folder, **{**OPTIONS, **options})
    return request.identity(request.trace())


@dataclass(frozen=True)
class Change:
    """One input that changes, and the field that is to be named. `make` changes the checkpoint's folder or patches what
    tells a fact, `options` are those of the second compile and `both` those of the two."""

    what: str
    named: str
    make: Callable[[Path, pytest.MonkeyPatch], object] = lambda folder, patch: None
    options: Mapping[str, Any] | None = None
    both: Mapping[str, Any] | None = None


def option(named: str, **options: Any) -> Change:
    return Change(f"option {next(iter(options))} {next(iter(options.values()))}", named, options=options)


def text_of(name: str, text: str, named: str) -> Change:
    return Change(f"file {name}", named, lambda folder, _: (folder / name).write_text(text))


def config(named: str, **fields: Any) -> Change:
    def make(folder: Path, _: pytest.MonkeyPatch) -> None:
        stored = json.loads((folder / "config.json").read_text())
        for name, value in fields.items():
            stored[name] = {**stored[name], **value} if isinstance(value, dict) else value
        (folder / "config.json").write_text(json.dumps(stored))

    return Change(f"config {next(iter(fields))}", named, make)


def source(path: str) -> Change:
    """A source file of ours that reads otherwise."""

    def make(_: Path, patch: pytest.MonkeyPatch) -> None:
        read = Path.read_bytes
        changed = ingot.compile.identity._PACKAGE / path
        assert changed.is_file()
        patch.setattr(Path, "read_bytes", lambda file: read(file) + (b"\n" if file == changed else b""))

    return Change(f"source {path}", f"sources.{path}", make)


def target(named: str, **fields: Any) -> Change:
    detect = Target.detect
    return Change(
        f"target {next(iter(fields))}",
        named,
        lambda _, patch: patch.setattr(
            Target, "detect", staticmethod(lambda device="auto": detect(device).model_copy(update=fields))
        ),
    )


def flip(folder: Path, byte: int = -1) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[byte] ^= 1
    file.write_bytes(data)


def rename(folder: Path, _: pytest.MonkeyPatch) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.rename(folder / "first.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(file.name, "first.safetensors"))


def other_compiler(_: Path, patch: pytest.MonkeyPatch) -> None:
    for module in (ingot.backends.cpu.emit, ingot.backends.inductor.emit):
        patch.setattr(module, "compiler_version", lambda: "g++ 99")


def other_definition(_: Path, patch: pytest.MonkeyPatch) -> None:
    """The model's definition gives another program, as an edit of blocks/attention.py would."""
    printed = ingot.compile.identity.print_program
    patch.setattr(ingot.compile.identity, "print_program", lambda program: printed(program).replace("eps=", "epsilon="))


_CHUNK = 20_000  # bytes, in place of 64 MiB: more than four of them in a tiny file
CONFIG = CHECKPOINTS[NAME].config
TARGET = Target.detect("cpu")
# Another processor than this one, whatever it has.
OTHERS = ("avx512",) if TARGET.features == ("avx2",) else ("avx2",)
COMPILER = ingot.backends.cpu.emit.compiler_version()
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
COMPILED = {"backend": "inductor"}

CHANGES = [
    option("options.max_batch: 8 -> 9", max_batch=9),
    option("options.max_tokens: 64 -> 65", max_tokens=65),
    option("options.max_seq_len: 400 -> 159", max_seq_len=159),
    option("options.dtype: float32 -> bfloat16", dtype="bfloat16"),
    option("options.dtype: float32 -> float16", dtype="float16"),
    option("options.deterministic: False -> True", deterministic=True),
    option("options.weight_budget: 1.0 -> 1.5", weight_budget=1.5),
    option("options.backends: reference rowwise -> inductor cpu reference rowwise", backend="inductor"),
    option("options.mesh.tp: 2 (only in B)", mesh={"tp": 2}),
    option("options.trace: full -> summary", trace="summary"),
    option("pipeline.insert-paged-kv.page_size: 16 -> 32", passes="default,insert-paged-kv{page_size=32}"),
    option("pipeline.fuse-qk-norm-rope.force: False -> True", passes="default,fuse-qk-norm-rope{force=true}"),
    option("pipeline.merge-linears (only in A)", passes="default,-merge-linears"),
    option("pipeline.cse (only in A)", passes="default,-cse"),
    option("pipeline.quantize: format=int8 ignore= lm_head=False overrides= (only in B)", passes="default,quantize"),
    option("options.quantize: None -> int8", quantize="int8"),
    Change("the last bit of a weight", f"checkpoint.{LAST} chunk 4", lambda folder, _: flip(folder)),
    Change("a bit of a weight", f"checkpoint.{LAST} chunk 3", lambda folder, _: flip(folder, 3 * _CHUNK + 5)),
    Change("the name of a file", f"checkpoint.{FIRST}: {FIRST} -> first.safetensors", rename),
    text_of("tokenizer.json", '{"a": 1}', "tokenizer.tokenizer.json"),
    text_of("generation_config.json", '{"eos_token_id": 3}', "tokenizer.generation_config.json"),
    text_of("chat_template.jinja", "other", "tokenizer.chat_template.jinja"),
    text_of("merges.txt", "", "tokenizer.merges.txt (only in B)"),
    Change(
        "a file less",
        "tokenizer.chat_template.jinja (only in A)",
        lambda folder, _: (folder / "chat_template.jinja").unlink(),
    ),
    config(f"config.rms_norm_eps: {CONFIG['rms_norm_eps']} -> 0.022", rms_norm_eps=0.022),
    config(f"config.rope_theta: {CONFIG['rope_theta']} -> 3002.0", rope_theta=3002.0),
    config("config.rope_scaling.factor: 2.5 -> 3.0", rope_scaling={"factor": 3.0}),
    config("config.max_position_embeddings: 160 -> 161", max_position_embeddings=161),
    config(f"config.torch_dtype: {CONFIG['torch_dtype']} -> bfloat16", torch_dtype="bfloat16"),
    config("config.eos_token_id: 2 -> 5", eos_token_id=5),
    source("passes/cse.py"),
    source("passes/manager.py"),
    source("compile/packing.py"),
    source("ir/ops/dense.py"),
    source("ir/verify.py"),
    source("backends/cpu/kernels/linear.cpp"),
    source("backends/inductor/emit.py"),
    target(f"target.features: {' '.join(TARGET.features)} -> {OTHERS[0]}", features=OTHERS),
    target(f"target.arch: {TARGET.arch} -> riscv64", arch="riscv64"),
    target(f"target.name: {TARGET.name} -> other", name="other"),
    Change(
        "the version of torch",
        f"target.versions.torch: {torch.__version__} -> 9.9.9",
        lambda _, patch: patch.setattr(torch, "__version__", "9.9.9"),
        both=COMPILED,
    ),
    Change("the C++ compiler", f"toolchain.cpu.c++: {COMPILER} -> g++ 99", other_compiler, both=COMPILED),
    Change(
        "a backend's compiler",
        f"toolchain.inductor.torch: {torch.__version__} -> 0",
        lambda _, patch: patch.setattr(Inductor, "toolchain", lambda self: {"torch": "0", "c++": COMPILER}),
        both=COMPILED,
    ),
    Change(
        "the schema",
        f"schema_version: {ingot.compile.identity.SCHEMA_VERSION} -> 99",
        lambda _, patch: patch.setattr(ingot.compile.identity, "SCHEMA_VERSION", 99),
    ),
    Change("the model's definition", "programs.main", other_definition),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.what)
def test_one_changed_input_is_named(change: Change, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", _CHUNK)
    before = document(folder, **(change.both or {}))
    assert not changes(before, document(folder, **(change.both or {})))
    change.make(folder, monkeypatch)
    found = why_requests_differ(before, document(folder, **(change.both or {}), **(change.options or {})))
    named = [str(one) for one in found.causes]
    assert found
    assert named == [change.named]
    assert all(one.follows == found.causes[0].path for one in found.changes if one.follows)


def test_what_follows_is_told_apart(folder: Path) -> None:
    """Several inputs: all are named, the deciding ones first, and what comes of them is not among them."""
    before = document(folder)
    flip(folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "torch_dtype": "bfloat16", "rms_norm_eps": 0.5}))
    found = why_requests_differ(before, document(folder, max_batch=9, mesh={"tp": 2}, backend="auto"))
    assert [one.path for one in found.causes] == [
        "options.backends",
        "options.max_batch",
        "options.mesh.tp",
        "config.rms_norm_eps",
        "config.torch_dtype",
        f"checkpoint.{LAST}",
    ]
    assert {one.path: one.follows for one in found.changes if one.follows} == {
        "options.dtype": "config.torch_dtype",
        "pipeline.order": "options.mesh.tp",
        "pipeline.shard": "options.mesh.tp",
        "pipeline.insert-collectives": "options.mesh.tp",
        "toolchain.inductor": "options.backends",
        "toolchain.cpu": "options.backends",
        "toolchain.gloo": "options.backends",
        "programs.main": "config.torch_dtype",
    }
    assert json.loads(json.dumps(found.to_json()))["changes"][0]["path"] == "options.backends"


def test_a_configuration_may_hold_infinities(folder: Path) -> None:
    """Others write them, and JSON knows none."""
    stored = json.loads((folder / "config.json").read_text())
    before = document(folder)
    stored["rope_scaling"]["unused"] = math.inf
    (folder / "config.json").write_text(json.dumps(stored))
    found = why_requests_differ(before, document(folder))
    assert [str(one) for one in found.causes] == ["config.rope_scaling.unused: Infinity (only in B)"]


def test_an_option_of_the_user_is_a_cause_of_its_own(folder: Path) -> None:
    """A dtype that was asked for does not come of the configuration, though that changed too."""
    before = document(folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "torch_dtype": "bfloat16"}))
    found = why_requests_differ(before, document(folder, dtype="float16"))
    assert [one.path for one in found.causes] == ["options.dtype", "config.torch_dtype"]


# Artifacts.

COMPILE: dict[str, Any] = {**OPTIONS, "max_seq_len": 64, "jobs": 1}


@pytest.fixture(scope="module")
def compiled(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of the checkpoint as it is, without a tokenizer."""
    return compile_model(checkpoint(NAME), tmp_path_factory.mktemp("why") / "a.ingot", **COMPILE).output


def test_two_artifacts(compiled: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    other, tuned = tmp_path / "other.ingot", tmp_path / "tuned.ingot"
    compile_model(checkpoint(NAME), other, **{**COMPILE, "passes": "default,-merge-linears"})
    shutil.copytree(checkpoint(NAME), tmp_path / "tuned")
    flip(tmp_path / "tuned")
    compile_model(tmp_path / "tuned", tuned, **COMPILE)
    a = open_artifact(compiled)
    assert digest_json(identity_of(a)) == a.manifest.request_key

    same = why_miss(a, open_artifact(compiled))
    assert not same and same.builds == (a.build_id,) * 2 and same.file == "" and same.changes == ()
    fewer = why_miss(a, open_artifact(other))
    assert [str(one) for one in fewer.causes] == ["pipeline.merge-linears (only in A)"]
    assert fewer.file.startswith("choices.json: ") and fewer.builds is not None
    weights = why_miss(a, open_artifact(tuned))
    assert [one.path for one in weights.causes] == [f"checkpoint.{LAST}"]
    # The request says so first; what follows it, the packed weights, comes later by name.
    assert weights.file.startswith(f"request.json: identity.checkpoint.{LAST}[0]")
    assert first_difference(a, a) == ""


def test_a_build_that_differs_by_itself_is_located(compiled: Path, tmp_path: Path) -> None:
    """One request, two builds: what the executables' compiler or a damaged disk would do."""
    for number, (file, edit, said) in enumerate(
        [
            (
                "plan.json",
                lambda text: text.replace('"reference"', '"other"', 1),
                "plan.json: positions.all.plans.main.buckets[0]",
            ),
            ("program.ir", lambda text: text.replace("eps=", "eps=1", 1), "program.ir, line "),
            ("trace/05-insert-ending.delta", lambda text: text + "+\n", "trace/05-insert-ending.delta, line "),
        ]
    ):
        shutil.copytree(compiled, changed := tmp_path / f"{number}.ingot")
        (changed / file).write_text(edit((changed / file).read_text()))
        sign(changed, file)
        found = why_miss(open_artifact(compiled), open_artifact(changed))
        assert not found and found.file.startswith(said), found.file
    shutil.copytree(compiled, changed := tmp_path / "forged.ingot")
    stored = json.loads((changed / "request.json").read_text())
    stored["identity"]["options"]["max_batch"] = 1
    (changed / "request.json").write_text(json.dumps(stored))
    sign(changed, "request.json")
    with pytest.raises(ArtifactError, match="does not match the request key"):
        identity_of(open_artifact(changed))


# Executables.


def regions_of(**fields: Any) -> list[Region]:
    return list(staged(traced({**CONFIG, **fields}))[1].programs["any"].regions.values())


def documents(regions: Sequence[Region], **changes: Any) -> dict[str, Document]:
    """What the executables of regions depend on, by their keys, on a target with some fields changed."""
    found = [exe_document(region, Inductor(), TARGET.model_copy(update=changes)) for region in regions]
    return {digest_json(one): one for one in found}


def test_executables_that_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = regions_of()
    base = documents(regions)
    assert executables_not_shared(base, documents(regions)) == ()
    (features,) = executables_not_shared(base, documents(regions, features=OTHERS))
    assert len(features.a) == len(features.b) == len(base) and set(features.a) == set(base)
    assert [str(one) for one in features.changes] == [f"target.features: {' '.join(TARGET.features)} -> {OTHERS[0]}"]
    with monkeypatch.context() as patch:
        patch.setattr(Inductor, "toolchain", lambda self: {"torch": "0", "c++": COMPILER})
        (torches,) = executables_not_shared(base, documents(regions))
        assert [str(one) for one in torches.changes] == [f"toolchain.torch: {torch.__version__} -> 0"]
    norms = executables_not_shared(base, documents(regions_of(rms_norm_eps=0.5)))
    lines = [str(change) for one in norms for change in one.changes]
    assert sum(len(one.a) for one in norms) == len(base)
    assert all(line.startswith("body line ") and "eps=0.5" in line and "eps=0.021" in line for line in lines)
    (alone,) = executables_not_shared(base, documents(regions[1:]))
    assert len(alone.a) == 1 and alone.b == () and alone.changes == ()


# The command.


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    import ingot.cli.main as cli

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run(cli.INGOT, ["why-miss", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_command_compares_with_a_compile_that_was_not_made(
    compiled: Path, checkpoint: Callable[[str], Path], tmp_path: Path, ask: Callable[..., tuple[int, str, str]]
) -> None:
    path, folder, report = compiled, checkpoint(NAME), open_artifact(compiled)
    key = report.manifest.request_key
    there = sorted(compiled.parent.iterdir())
    options = ["--backend", "reference", "--max-batch", "8", "--max-tokens", "64", "--max-seq-len", "64"]
    assert ask(path, folder, *options) == (0, f"same request_key {key}\n", "")
    code, out, _ = ask(path, folder, *options[:-1], "63")
    assert code == 0 and out.startswith("the request_key differs by one input:\n  options.max_seq_len: 64 -> 63\n")
    assert out.endswith("consequences:\n  programs.main  (from options.max_seq_len)\n")
    code, out, _ = ask(path, folder, *options, "--mesh", "tp=2", "--json")
    causes = [one for one in json.loads(out)["changes"] if "follows" not in one]
    assert causes[0] == {"path": "options.mesh.tp", "b": 2} and not json.loads(out)["same_request"]
    code, out, _ = ask(path, path)
    assert out == f"same request_key {key}\nsame build_id {report.build_id}\n"
    code, _, error = ask(path, folder, "--max-bach", "3")
    assert code == 2 and "--max-bach" in error and "the options of `ingot compile`" in error
    code, _, error = ask(path, path, "--max-batch", "3")
    assert code == 2 and "of an artifact" in error
    code, _, error = ask(path, tmp_path)
    assert code == 2 and "is no artifact" in error
    assert sorted(compiled.parent.iterdir()) == there, "nothing was compiled"


def test_two_artifacts_are_compared_without_torch(compiled: Path) -> None:
    code = (
        "import contextlib, io, sys, ingot.cli.main as cli\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    assert cli.run(cli.INGOT, ['why-miss', {str(compiled)!r}, {str(compiled)!r}]) == 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
