"""Opening artifacts: whatever is damaged, missing, extra or foreign is refused with an ArtifactError that names it."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.compile.publish import ArtifactWriter
from ingot.ir.artifact import digest as digest_module
from ingot.ir.artifact import manifest as schema
from ingot.ir.artifact.manifest import FileEntry, Manifest
from ingot.ir.errors import ArtifactError, TargetError
from ingot.runtime.loading.artifact import open_artifact

CHUNK = 100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 100 bytes, so that a small file has several."""
    for module in (digest_module, schema, sys.modules["ingot.runtime.loading.artifact"]):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.ingot"
    manifest = Manifest(
        schema_version=schema.SCHEMA_VERSION,
        name="tiny",
        request_key="ab" * 32,
        exe_keys=("cd" * 32,),
        target={"device": "cpu", "cores": 2, "features": ("avx2", "fma")},
        versions={"torch": "2.13.0"},
        model={"architecture": "LlamaForCausalLM", "max_seq_len": 128},
    )
    with ArtifactWriter(path) as writer:
        writer.write_text("program.ir", "program main\n")
        writer.write_json("plan.json", {"b": 1, "a": [1.5, None, "é"]})
        writer.write_bytes("exe/cpu/0/kernel.so", bytes(range(256)))
        writer.write_bytes("weights/00000.safetensors", bytes(range(250)) * 2)
        writer.write_bytes("weights/00001.safetensors", b"w" * 100)
        writer.write_text("empty.txt", "")
        writer.write_json("timings.json", {"seconds": 1.25})
        writer.publish(manifest)
    return path


def rewrite_manifest(artifact: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits the manifest and makes the checksums fit again."""
    value = json.loads((artifact / "manifest.json").read_text())
    edit(value)
    data = json.dumps(value).encode()
    (artifact / "manifest.json").write_bytes(data)
    text = schema.checksum_text(data, {"timings.json": (artifact / "timings.json").read_bytes()})[0]
    (artifact / "manifest.sha256").write_text(text)


def refusal(artifact: Path | str) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(artifact)
    return str(caught.value)


def test_an_artifact_opens(artifact: Path) -> None:
    opened = open_artifact(artifact)
    opened.verify_files()
    assert opened.folder == artifact
    assert opened.build_id == hashlib.sha256((artifact / "manifest.json").read_bytes()).hexdigest()
    assert opened.manifest.target == {"device": "cpu", "cores": 2, "features": ("avx2", "fma")}
    assert opened.read_text("program.ir") == "program main\n"
    assert opened.read_json("plan.json") == {"a": [1.5, None, "é"], "b": 1}
    assert opened.file("exe/cpu/0/kernel.so").read_bytes() == bytes(range(256))
    assert opened.weight_files() == ("weights/00000.safetensors", "weights/00001.safetensors")
    assert [entry.path for entry in opened.manifest.files] == [
        "empty.txt",
        "exe/cpu/0/kernel.so",
        "plan.json",
        "program.ir",
        "weights/00000.safetensors",
        "weights/00001.safetensors",
    ]
    kernel = opened.manifest.files[1]
    data = bytes(range(256))
    assert kernel.size == 256
    assert kernel.chunks == tuple(hashlib.sha256(data[i : i + CHUNK]).hexdigest() for i in (0, 100, 200))


def test_the_checksums_are_sha256sums_own_format(artifact: Path) -> None:
    result = subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=artifact, capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout == "manifest.json: OK\ntimings.json: OK\n"


def test_a_link_to_an_artifact_opens(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "latest.ingot").symlink_to(artifact)
    assert open_artifact(tmp_path / "latest.ingot").folder == artifact


def test_one_changed_byte_in_each_file_in_turn_is_refused(artifact: Path) -> None:
    files = [path for path in sorted(artifact.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) == 8  # all but the empty one
    for path in files:
        original = path.read_bytes()
        # The whole of a small text file, else the first and last byte and the edges of each chunk.
        size = len(original)
        positions = range(size) if path.suffix == ".sha256" else {0, size - 1, size // 2, *range(99, size, 100)}
        for position in positions:
            data = bytearray(original)
            data[position] ^= 1
            path.write_bytes(data)
            with pytest.raises(ArtifactError) as caught:
                open_artifact(artifact).verify_files()
            relpath = path.relative_to(artifact).as_posix()
            assert relpath in str(caught.value)
            if relpath not in schema.UNLISTED:
                assert f"{relpath}, chunk {position // CHUNK} " in str(caught.value)
        path.write_bytes(original)
    open_artifact(artifact).verify_files()


def test_weights_are_left_to_the_loader(artifact: Path) -> None:
    weights = artifact / "weights" / "00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    opened = open_artifact(artifact)
    opened.verify_files(["weights/00001.safetensors", "plan.json"])
    with pytest.raises(ArtifactError, match=r"weights/00000\.safetensors, chunk 4 \(from byte 400 on\)"):
        opened.verify_files(opened.weight_files(), threads=3)


def test_what_is_checked_before_the_digests_needs_no_file_opened(artifact: Path) -> None:
    kernel = artifact / "exe/cpu/0/kernel.so"
    kernel.write_bytes(b"?" * 256)
    order = []

    def check(manifest: Manifest) -> None:
        order.append(manifest.target["device"])
        raise TargetError("another machine")

    with pytest.raises(TargetError):
        open_artifact(artifact, check=check)
    assert order == ["cpu"]
    assert open_artifact(artifact, verify=False).manifest.name == "tiny"
    assert "kernel.so" in refusal(artifact)


def test_paths_that_are_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "absent", "not there"),
        (tmp_path / "file", "not a folder"),
        (tmp_path / "loop", "not there"),
        (tmp_path / "empty", "no artifact: it has no manifest.json"),
        ("a\0b", "cannot be opened"),
        ("x" * 5000, "cannot be opened|not there"),
    ):
        with pytest.raises(ArtifactError, match=message):
            open_artifact(path)


def test_checksums_missing_or_malformed(artifact: Path) -> None:
    checksums = artifact / "manifest.sha256"
    first, second = checksums.read_text().splitlines(keepends=True)
    for text, message in (
        (first, "the files that are there"),
        (second + first, "the files that are there"),
        (first + second + second, "the files that are there"),
        (first.upper() + second, "malformed"),
        (first + second.rstrip(), "malformed"),
        (first.replace("  ", " ") + second, "malformed"),
        ("", "malformed"),
        ("0" * 64 + "  manifest.json\n" + second, "manifest.json does not match"),
        (first + "0" * 64 + "  timings.json\n", "timings.json does not match"),
    ):
        checksums.write_text(text)
        assert message in refusal(artifact)
    checksums.unlink()
    assert "no manifest.sha256" in refusal(artifact)


def test_timings_may_not_vanish_or_appear(artifact: Path) -> None:
    (artifact / "timings.json").unlink()
    assert "timings.json" in refusal(artifact)


@pytest.mark.parametrize("version", [0, schema.SCHEMA_VERSION + 1, "1", None, float(schema.SCHEMA_VERSION), True])
def test_another_schema_version_names_both(artifact: Path, version: object) -> None:
    # Another version may have other fields: the version is what must be said, not that they are unknown.
    rewrite_manifest(artifact, lambda value: value.update(schema_version=version, novel=1))
    text = refusal(artifact)
    assert f"schema version {version}" in text
    assert f"schema version {schema.SCHEMA_VERSION}, the one that this Ingot reads" in text


MANIFEST_EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "unknown field": (lambda m: m.update(novel=1), "novel"),
    "missing field": (lambda m: m.pop("versions"), "versions"),
    "wrong type": (lambda m: m.update(name=3), "name"),
    "unknown field of a file": (lambda m: m["files"][0].update(mode=7), r"files\.0\.mode"),
    "size a string": (lambda m: m["files"][0].update(size="0"), r"files\.0\.size"),
    "size negative": (lambda m: m["files"][0].update(size=-1), r"files\.0\.size"),
    "digest malformed": (lambda m: m["files"][1]["chunks"].__setitem__(0, "AB" * 32), r"chunks\.0"),
    "digest too few": (lambda m: m["files"][1]["chunks"].pop(), "but 2 digests"),
    "unsorted": (lambda m: m["files"].reverse(), "not sorted"),
    "twice": (lambda m: m["files"].insert(0, m["files"][0]), "not sorted by path, or one is listed twice"),
    "absolute": (lambda m: m["files"][0].update(path="/etc/passwd"), "/etc/passwd.* is refused"),
    "traversal": (lambda m: m["files"][0].update(path="../outside"), "is refused"),
    "traversal inside": (lambda m: m["files"][0].update(path="a/../../outside"), "is refused"),
    "backslash": (lambda m: m["files"][0].update(path="a\\b"), "backslash"),
    "control character": (lambda m: m["files"][0].update(path="a\nb"), "printable"),
    "dot": (lambda m: m["files"][0].update(path="./empty.txt"), "is refused"),
    "empty path": (lambda m: m["files"][0].update(path=""), "is refused"),
    "lists itself": (lambda m: m["files"][0].update(path="manifest.json"), "cannot be listed"),
    "lists the timings": (lambda m: m["files"][0].update(path="timings.json"), "cannot be listed"),
}


@pytest.mark.parametrize("case", MANIFEST_EDITS)
def test_a_manifest_that_breaks_the_schema_is_refused(artifact: Path, case: str) -> None:
    (artifact.parent / "outside").write_text("")
    edit, message = MANIFEST_EDITS[case]
    rewrite_manifest(artifact, edit)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(artifact)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"schema_version": 1, "schema_version": 1}']
)
def test_a_manifest_that_is_not_json_is_refused(artifact: Path, data: bytes) -> None:
    (artifact / "manifest.json").write_bytes(data)
    timings = (artifact / "timings.json").read_bytes()
    (artifact / "manifest.sha256").write_text(schema.checksum_text(data, {"timings.json": timings})[0])
    refusal(artifact)


def test_files_must_be_exactly_those_listed(artifact: Path) -> None:
    extra = artifact / "exe" / "cpu" / "extra.so"
    extra.write_bytes(b"")
    assert "exe/cpu/extra.so: not listed" in refusal(artifact)
    extra.unlink()

    program = artifact / "program.ir"
    data = program.read_bytes()
    program.unlink()
    assert "program.ir: missing" in refusal(artifact)
    program.write_bytes(data + b"x")
    assert f"program.ir: expected {len(data)} bytes, found {len(data) + 1}" in refusal(artifact)
    program.unlink()

    program.mkdir()
    assert "program.ir: missing" in refusal(artifact)
    program.rmdir()
    outside = artifact.parent / "outside.ir"
    outside.write_bytes(data)
    program.symlink_to(outside)
    assert "program.ir: a link" in refusal(artifact)
    program.unlink()
    os.mkfifo(program)
    assert "program.ir: a link or special file" in refusal(artifact)
    program.unlink()
    program.write_bytes(data)
    open_artifact(artifact)


@pytest.mark.parametrize("name", ["weights", "manifest.json", "manifest.sha256", "timings.json"])
def test_links_inside_are_refused(artifact: Path, name: str) -> None:
    moved = artifact.parent / "moved"
    (artifact / name).rename(moved)
    (artifact / name).symlink_to(moved)
    assert f"{name}: a link" in refusal(artifact) if name == "weights" else f"{name} is a link" in refusal(artifact)


def test_an_open_artifact_gives_only_listed_files(artifact: Path) -> None:
    opened = open_artifact(artifact)
    for relpath in ("../outside", "/etc/passwd", "nothing", "manifest.json"):
        with pytest.raises(ArtifactError, match="has no file"):
            opened.file(relpath)
    with pytest.raises(ArtifactError, match="not UTF-8"):
        opened.read_text("exe/cpu/0/kernel.so")
    with pytest.raises(ArtifactError, match="not JSON"):
        opened.read_json("program.ir")
    (artifact / "program.ir").unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        opened.read_text("program.ir")
    with pytest.raises(ArtifactError, match="cannot be read"):
        opened.verify_files()


def test_entries_are_frozen_and_strict() -> None:
    entry = FileEntry(path="a", size=1, chunks=("0" * 64,))
    with pytest.raises(ValueError, match="frozen"):
        entry.size = 2  # type: ignore[misc]
    with pytest.raises(ValueError, match="size"):
        FileEntry(path="a", size=True, chunks=("0" * 64,))


def test_opening_brings_in_no_compiler(artifact: Path) -> None:
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import ingot.runtime.loading.artifact\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "heavy = [n for n in set(sys.modules) - before if n.startswith(('torch._inductor', 'torch._dynamo'))]\n"
        "assert not heavy and not new & {'sympy', 'triton', 'numpy', 'transformers'}, (heavy, new)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
