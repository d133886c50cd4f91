"""Real artifacts, damaged or foreign: always an IngotError that names the place, never a crash."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from backend_table import patch_entry
from damaged import inductor, put, reference, refusal, run
from resign import Edit, edit_json

from ingot import LLM, compile_model
from ingot.ir.artifact.manifest import CHECKSUMS, OUTSIDE_IDENTITY, SCHEMA_VERSION
from ingot.ir.artifact.manifest_file import MANIFEST
from ingot.ir.errors import ArtifactError, ConfigError, OptionError, TargetError
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import load_artifact

pytestmark = pytest.mark.one_in_file(3)


def files_of(artifact: Path) -> list[Path]:
    return [path for path in sorted(artifact.rglob("*")) if path.is_file()]


# --- damage ---------------------------------------------------------------------------------------------------------


def damage_each_file(artifact: Path) -> None:
    run(artifact)
    files = files_of(artifact)
    assert len(files) > 15
    for file in files:
        relpath, original = file.relative_to(artifact).as_posix(), file.read_bytes()
        for position in (0, len(original) // 2, len(original) - 1):
            changed = bytearray(original)
            changed[position] ^= 1
            put(file, changed)
            with pytest.raises(ArtifactError, match=re.escape(relpath)) as caught:
                open_artifact(artifact).verify_files()
            assert caught.value.exit_code == 2
        assert relpath in refusal(artifact)
        for length in (0, len(original) // 2, len(original) - 1):
            put(file, original[:length])
            with pytest.raises(ArtifactError, match=re.escape(relpath)):
                open_artifact(artifact)
        assert relpath in refusal(artifact)
        put(file, original)
    run(artifact)


@reference
def test_each_file_in_turn_with_a_byte_changed_or_cut_short(plain: Path) -> None:
    damage_each_file(plain)


@inductor
def test_each_file_in_turn_with_executables(compiled: Path) -> None:
    assert list(compiled.glob("exe/*/*/*.so"))
    damage_each_file(compiled)


@reference
def test_each_file_in_turn_missing_or_a_link(plain: Path, tmp_path: Path) -> None:
    for file in files_of(plain):
        relpath = file.relative_to(plain).as_posix()
        moved = tmp_path / "moved"
        file.rename(moved)
        assert relpath in refusal(plain)
        file.symlink_to(moved)
        text = refusal(plain)
        assert relpath in text and "link" in text
        file.unlink()
        file.mkdir()
        assert relpath in refusal(plain)
        file.rmdir()
        moved.rename(file)
    run(plain)


@reference
@pytest.mark.parametrize("relpath", ["extra", "weights/00001.safetensors", "exe/cpu/0/region.so", ".hidden"])
def test_a_file_too_many(plain: Path, relpath: str) -> None:
    (plain / relpath).parent.mkdir(parents=True, exist_ok=True)
    (plain / relpath).write_bytes(b"")
    assert f"{relpath}: not listed" in refusal(plain)


@reference
def test_another_schema_version(plain: Path) -> None:
    edit_json(plain, MANIFEST, lambda manifest: manifest.update(schema_version=SCHEMA_VERSION + 1, novelty={}))
    text = refusal(plain)
    assert f"schema version {SCHEMA_VERSION + 1}" in text
    assert f"schema version {SCHEMA_VERSION}, the one" in text


# --- what is something else -----------------------------------------------------------------------------------------


@reference
def test_folders_that_are_no_artifact(plain: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "half.ingot").mkdir()
    (tmp_path / "half.ingot" / CHECKSUMS).write_text("")
    for path in ("empty", "file", "half.ingot", "absent"):
        assert "artifact" in refusal(tmp_path / path)
    with pytest.raises(ArtifactError, match="this is a checkpoint: make one with `compile-model"):
        load_artifact(checkpoint("llama-plain"))
    with pytest.raises(ConfigError, match="this is an artifact: it is compiled already"):
        compile_model(plain, tmp_path / "again.ingot")
    with pytest.raises(OptionError, match="takes no option 'backend'"):
        LLM(plain, backend="reference")
    assert not (tmp_path / "again.ingot").exists()


@reference
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_pages": 0},
        {"num_kv_pages": -1},
        {"num_kv_pages": True},
        {"num_kv_pages": "8"},
        {"num_kv_pages": 1 << 40},
        {"num_kv_pages": 1 << 80},
        {"max_num_seqs": 0},
        {"max_num_seqs": 9},
        {"max_num_seqs": "2"},
        {"max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 1 << 40},
        {"max_num_batched_tokens": 1.5},
    ],
    ids=str,
)
def test_options_of_loading_that_cannot_be_met(plain: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        LLM(plain, **options)


# --- another machine ------------------------------------------------------------------------------------------------

FOREIGN: dict[str, tuple[Edit, str]] = {
    "name": (lambda m: m["target"].update(name="H200"), "name: H200 against cpu"),
    "device": (
        lambda m: m["target"].update(device="cuda"),
        "compiled for a GPU, cpu, and this machine has no GPU|name: cpu against sm_",
    ),
    "arch": (lambda m: m["target"].update(arch="riscv64"), "arch: riscv64 against"),
    "sm": (lambda m: m["target"].update(sm=90), "sm: 90 against None"),
    "features": (lambda m: m["target"]["features"].append("avx1024"), "features: .*avx1024"),
    "feature missing": (lambda m: m["target"]["features"].clear(), r"features: \[\] against"),
    "torch": (lambda m: m["versions"].update(torch="2.10.0"), r"versions\.torch: 2\.10\.0 against"),
    "another library": (lambda m: m["versions"].update(cuda="13.0"), r"versions\.cuda: 13\.0 against missing"),
    "no version": (lambda m: m["versions"].clear(), r"versions\.torch: missing against"),
    "a field missing": (lambda m: m["target"].pop("arch"), "arch: missing against"),
    "a field too many": (lambda m: m["target"].update(vendor="x"), "vendor: x against missing"),
    "a wrong type": (lambda m: m["target"].update(features="avx512"), "features: avx512 against"),
}

_opened: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(str(arguments[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The paths that Python opens during a test."""
    global _opened
    if not getattr(sys, "_ingot_watches_opens", False):
        sys.addaudithook(_watch)  # stays as long as the process
        sys._ingot_watches_opens = True  # type: ignore[attr-defined]
    _opened = []
    yield _opened
    _opened = None


@inductor
@pytest.mark.parametrize("field", FOREIGN)
def test_an_artifact_for_another_target(
    compiled: Path, field: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not(*arguments: object) -> Any:
        raise AssertionError("an executable was loaded")

    edit, message = FOREIGN[field]
    edit_json(compiled, MANIFEST, edit)
    patch_entry(monkeypatch, "inductor", executable=must_not)
    times = []
    opened.clear()
    for _ in range(5):
        begin = time.perf_counter()
        with pytest.raises(TargetError, match=message) as caught:
            load_artifact(compiled)
        times.append(time.perf_counter() - begin)
    assert caught.value.exit_code == 2
    assert min(times) < 0.1
    inside = {Path(path).relative_to(compiled).as_posix() for path in opened if path.startswith(str(compiled))}
    assert inside <= {MANIFEST, CHECKSUMS, *OUTSIDE_IDENTITY}


# --- limits that are not the plan's ---------------------------------------------------------------------------------


WRONG_LIMITS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda m: m["model"].pop("vocab_size"), "vocab_size is None"),
    "a text": (lambda m: m["model"].update(max_batch="8"), "max_batch is '8'"),
    "zero": (lambda m: m["model"].update(page_size=0), "page_size is 0"),
    "negative": (lambda m: m["model"].update(max_seq_len=-1), "max_seq_len is -1"),
    "a truth value": (lambda m: m["model"].update(max_tokens=True), "max_tokens is True"),
    "a fraction": (lambda m: m["model"].update(max_tokens=1.5), r"max_tokens is 1\.5"),
    "more sequences than compiled": (lambda m: m["model"].update(max_batch=9), "the limits need B up to 9"),
    "more tokens than compiled": (lambda m: m["model"].update(max_tokens=1025), "the limits need T up to 1025"),
    "a longer context": (lambda m: m["model"].update(max_seq_len=1 << 40), "the limits need P up to"),
    "other pages": (lambda m: m["model"].update(page_size=32), "the limits need P up to 5|page_size is 32"),
    "no end tokens": (lambda m: m["model"].pop("eos_token_ids"), "eos_token_ids is None"),
    "wrong end tokens": (lambda m: m["model"].update(eos_token_ids="1,x"), "eos_token_ids is '1,x'"),
    "negative end tokens": (lambda m: m["model"].update(eos_token_ids="-1"), "eos_token_ids is '-1'"),
    "end tokens beyond counting": (lambda m: m["model"].update(eos_token_ids="9" * 5000), "eos_token_ids is '9"),
}


@reference
@pytest.mark.parametrize("case", WRONG_LIMITS)
def test_a_manifest_with_other_limits_than_the_plan(plain: Path, case: str) -> None:
    edit, message = WRONG_LIMITS[case]
    edit_json(plain, MANIFEST, edit)
    assert re.search(message, refusal(plain))
