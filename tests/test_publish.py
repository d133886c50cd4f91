"""Writing artifacts: complete or not there, whatever happens on the way."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ingot.compile.folder_writer
from ingot.compile.publish import ArtifactWriter
from ingot.ir.artifact.manifest import SCHEMA_VERSION, FileEntry, Manifest
from ingot.ir.errors import ArtifactError, BackendError, InternalError, OutputError
from ingot.ir.json_text import dump_json
from ingot.runtime.loading.artifact import open_artifact


def manifest(**fields: Any) -> Manifest:
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": "tiny",
        "request_key": "key",
        "exe_keys": (),
        "target": {},
        "versions": {},
        "model": {},
    }
    return Manifest(**(values | fields))


def write(output: Path, text: str = "program\n") -> str:
    with ArtifactWriter(output) as writer:
        writer.write_text("program.ir", text)
        return writer.publish(manifest())


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_equal_contents_give_equal_bytes_and_build_ids(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first, second = write(tmp_path / "a.ingot"), write(tmp_path / "elsewhere" / "b.ingot")
    assert first == second == open_artifact(tmp_path / "a.ingot").build_id
    for name in ("manifest.json", "manifest.sha256", "program.ir"):
        assert (tmp_path / "a.ingot" / name).read_bytes() == (tmp_path / "elsewhere" / "b.ingot" / name).read_bytes()
    assert write(tmp_path / "c.ingot", "another\n") != first
    assert leftovers(tmp_path) == []


def test_timings_are_outside_the_build_id(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a.ingot") as writer:
        writer.write_text("program.ir", "program\n")
        writer.write_json("timings.json", {"seconds": 3})
        build_id = writer.publish(manifest())
    assert build_id == write(tmp_path / "b.ingot")
    open_artifact(tmp_path / "a.ingot")


def test_json_is_canonical(tmp_path: Path) -> None:
    assert dump_json({"b": [1, 2.5], "a": "é"}) == '{\n "a": "\\u00e9",\n "b": [\n  1,\n  2.5\n ]\n}\n'
    with pytest.raises(ValueError):
        dump_json(float("nan"))
    write(tmp_path / "a.ingot")
    text = (tmp_path / "a.ingot" / "manifest.json").read_text()
    assert text == open_artifact(tmp_path / "a.ingot").manifest.dump() == dump_json(json.loads(text))


def test_nothing_is_visible_before_publish_and_modes_are_the_users(tmp_path: Path) -> None:
    output = tmp_path / "a.ingot"
    before = os.umask(0o027)
    try:
        with ArtifactWriter(output) as writer:
            writer.write_text("exe/cpu/x.so", "x")
            (temporary,) = tmp_path.iterdir()
            assert temporary.name.startswith(f".a.ingot.tmp-{os.getpid()}-")
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
            assert not output.exists()
            writer.publish(manifest())
    finally:
        os.umask(before)
    assert stat.S_IMODE(output.stat().st_mode) == 0o750
    assert stat.S_IMODE((output / "exe/cpu/x.so").stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("failure", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), None])
def test_leaving_without_publish_leaves_nothing(tmp_path: Path, failure: BaseException | None) -> None:
    def attempt() -> None:
        with ArtifactWriter(tmp_path / "a.ingot") as writer:
            writer.write_text("deep/er/program.ir", "x")
            if failure is not None:
                raise failure

    if failure is None:
        attempt()
    else:
        with pytest.raises(type(failure)) as caught:
            attempt()
        assert caught.value is failure
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for output, message in (
        (tmp_path / "file", "exists already"),
        (tmp_path / "folder", "exists already"),
        (tmp_path / "dangling", "exists already"),
        (tmp_path / "absent" / "a.ingot", "there is no folder"),
        (tmp_path / "file" / "a.ingot", "there is no folder"),
        (tmp_path / ("x" * 250), "cannot be written"),
        (Path("/"), "exists already|cannot be an artifact's name"),
        (Path("/proc/a.ingot"), "not writable|cannot be written"),
    ):
        with pytest.raises(OutputError, match=message):
            write(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "folder"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="not writable"):
        write(tmp_path / "a.ingot")


def test_misuse_is_our_fault(tmp_path: Path) -> None:
    for relpath in ("../a", "/a", "a//b", "", "manifest.json", "manifest.sha256"):
        with pytest.raises(InternalError), ArtifactWriter(tmp_path / "a.ingot") as writer:
            writer.path(relpath)
    with pytest.raises(InternalError, match="lists files already"), ArtifactWriter(tmp_path / "a.ingot") as writer:
        writer.publish(manifest(files=(FileEntry(path="a", size=0, chunks=()),)))
    with pytest.raises(InternalError, match="link"), ArtifactWriter(tmp_path / "a.ingot") as writer:
        writer.path("link").symlink_to("/etc/passwd")
        writer.publish(manifest())
    with pytest.raises(InternalError, match="not open"):
        writer.publish(manifest())
    assert list(tmp_path.iterdir()) == []


# --- two writers --------------------------------------------------------------------------------------------------


def test_the_slower_of_two_writers_is_told(tmp_path: Path) -> None:
    output = tmp_path / "a.ingot"
    with pytest.raises(OutputError, match="exists by now"), ArtifactWriter(output) as slow:
        slow.write_text("program.ir", "slow\n")
        write(output, "fast\n")
        slow.publish(manifest())
    assert open_artifact(output).read_text("program.ir") == "fast\n"
    assert leftovers(tmp_path) == []


def test_an_empty_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists by now"), ArtifactWriter(tmp_path / "a.ingot") as writer:
        (tmp_path / "a.ingot").mkdir()
        writer.publish(manifest())
    assert list((tmp_path / "a.ingot").iterdir()) == []


def test_a_taken_name_is_noticed_in_the_rename_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "a.ingot"
    with pytest.raises(OutputError, match="exists by now"), ArtifactWriter(output) as slow:
        slow.write_text("program.ir", "slow\n")
        write(output, "fast\n")
        # The check before the rename sees nothing, as when the other writer comes between the two.
        monkeypatch.setattr(ingot.compile.folder_writer.os.path, "lexists", lambda path: False)
        slow.publish(manifest())
    assert open_artifact(output).read_text("program.ir") == "fast\n"
    assert leftovers(tmp_path) == []


RACER = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from ingot.ir.artifact.manifest import SCHEMA_VERSION, Manifest
from ingot.ir.errors import OutputError
from ingot.compile.publish import ArtifactWriter
output, name = Path(sys.argv[1]), sys.argv[2]
try:
    with ArtifactWriter(output) as writer:
        writer.write_text("program.ir", name)
        print("ready", flush=True)
        sys.stdin.readline()
        empty = dict(exe_keys=(), target={}, versions={}, model={})
        writer.publish(Manifest(schema_version=SCHEMA_VERSION, name=name, request_key="k", **empty))
    print("won", flush=True)
except OutputError as error:
    print("lost", flush=True)
"""


@pytest.fixture
def start_writer(tmp_path: Path) -> Iterator[Any]:
    running = []

    def start(output: Path, name: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", RACER, str(output), name, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_two_processes_race(tmp_path: Path, start_writer: Any) -> None:
    output = tmp_path / "a.ingot"
    racers = [start_writer(output, name) for name in ("one", "two", "three")]
    assert len(leftovers(tmp_path)) == 3
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert sorted(results) == ["lost", "lost", "won"]
    winner = ("one", "two", "three")[results.index("won")]
    assert open_artifact(output).read_text("program.ir") == winner
    assert leftovers(tmp_path) == []


# --- kill -9 and a full disk --------------------------------------------------------------------------------------


def test_after_kill_the_next_writer_starts_clean(tmp_path: Path, start_writer: Any) -> None:
    output = tmp_path / "a.ingot"
    killed, alive = start_writer(output, "killed"), start_writer(output, "alive")
    other = start_writer(tmp_path / "b.ingot", "other")
    (tmp_path / ".a.ingot.tmp-notes").mkdir()  # the user's, though the name is close
    for process in (killed, other):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not output.exists()
    write(output)
    assert open_artifact(output).read_text("program.ir") == "program\n"
    # Of this output, only what the dead one left is gone; another output's is its own next writer's business.
    left = leftovers(tmp_path)
    assert left[0].startswith(f".a.ingot.tmp-{alive.pid}-")
    assert left[1] == ".a.ingot.tmp-notes"
    assert left[2].startswith(f".b.ingot.tmp-{other.pid}-")
    assert len(left) == 3


def test_a_dead_writer_with_our_own_number_is_stale_too(tmp_path: Path) -> None:
    """In a container every compile may have the same process number: the lock decides, not the number."""
    stale = tmp_path / f".a.ingot.tmp-{os.getpid()}-0123abcd"
    (stale / "artifact").mkdir(parents=True)
    with ArtifactWriter(tmp_path / "a.ingot"):
        assert not stale.exists()
        with ArtifactWriter(tmp_path / "a.ingot"):
            assert len(leftovers(tmp_path)) == 2


def test_without_locks_the_process_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(ingot.compile.folder_writer.fcntl, "flock", no_locks)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, live = (tmp_path / f".a.ingot.tmp-{pid}-0123abcd" for pid in (dead.pid, os.getpid()))
    stale.mkdir()
    live.mkdir()
    write(tmp_path / "a.ingot")
    assert leftovers(tmp_path) == [live.name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["write_bytes", "write_text", "fsync"])
def test_a_full_disk_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(number, "the number says it")

    monkeypatch.setattr(os if step == "fsync" else Path, step, full)
    with pytest.raises(OutputError, match="disk is full"):
        write(tmp_path / "a.ingot")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_met_by_a_compiler_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="disk is full"), ArtifactWriter(tmp_path / "a.ingot"):
        raise BackendError("g++ failed: kernel.o: No space left on device")
    with pytest.raises(BackendError, match="other reason"), ArtifactWriter(tmp_path / "a.ingot"):
        raise BackendError("g++ failed for some other reason")
    with pytest.raises(PermissionError), ArtifactWriter(tmp_path / "a.ingot"):
        raise PermissionError(errno.EACCES, "not the disk")


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        with pytest.raises(OutputError, match="disk is full"), ArtifactWriter(disk / "a.ingot") as writer:
            for i in range(64):
                writer.write_bytes(f"weights/{i}", bytes(1 << 16))
        assert list(disk.iterdir()) == []
        write(disk / "a.ingot")
        open_artifact(disk / "a.ingot")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_large_file_has_one_digest_per_chunk(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a.ingot") as writer:
        with writer.path("weights/0.safetensors").open("wb") as file:
            file.truncate((64 << 20) + 1)  # sparse
        writer.publish(manifest())
    artifact = open_artifact(tmp_path / "a.ingot")
    (entry,) = artifact.manifest.files
    assert len(entry.chunks) == 2
    start = time.monotonic()
    artifact.verify_files()
    with (tmp_path / "a.ingot/weights/0.safetensors").open("r+b") as file:
        file.seek(64 << 20)
        file.write(b"x")
    with pytest.raises(ArtifactError, match="chunk 1 "):
        artifact.verify_files()
    assert time.monotonic() - start < 30
