"""The context of a GPU is begun beside the import of torch: with a stand-in for torch whose library counts."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ingot.ir.artifact.manifest_file import device_of
from ingot.runtime.cuda import early_context
from ingot.runtime.cuda.early_context import begin_context, make_context, start_cublas
from ingot.runtime.loading.phases import Phases

pytestmark = pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="builds a library")

# `cudaFree` returns when it is told to, so whoever tells it must be able to run meanwhile.
LIBRARY = """
#include <unistd.h>
static volatile int calls = 0, released = 0;
int called(void) { return calls; }
void release(void) { released = 1; }
int cudaFree(void *p) { calls++; while (!released) usleep(1000); return p != 0; }
int cublasCreate_v2(void **p) { *p = 0; return 0; }
int cublasDestroy_v2(void *p) { return p != 0; }
"""
LIBRARY_WITHOUT_RUNTIME = "int called(void) { return 0; } void release(void) {}"

# A library that is loaded early and Python that runs long, as in torch's own package.
TORCH = """
import ctypes, pathlib, time
time.sleep(0.05)
library = ctypes.CDLL(str(pathlib.Path(__file__).parent / "lib" / "libtorch_cuda.so"))
end = time.monotonic() + 5 * {asked}
while not library.called() and time.monotonic() < end:
    time.sleep(0.001)
seen = library.called()
library.release()
"""

CHILD = """
import json, sys
from ingot.runtime.cuda.early_context import begin_context
from ingot.runtime.loading.phases import Phases

phases = Phases()
context = begin_context(phases)
seen = None
try:
    import torch
    seen = torch.seen
except ImportError as error:
    seen = str(error)
finally:
    context.imported()
context.wait()
print(json.dumps([seen, sorted(phases.seconds)]))
"""


def start(folder: Path, torch: str, library: str | None = None) -> list[object]:
    """What a new process sees that begins a context and imports this stand-in for torch."""
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(torch)
    if library is not None:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "torch" / "lib" / "libtorch_cuda.so"]
        subprocess.run(command, input=library, text=True, check=True)
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_it_is_begun_while_torch_is_being_imported(tmp_path: Path) -> None:
    assert start(tmp_path, TORCH.format(asked=1), LIBRARY) == [1, ["context", "cublas"]]


def test_a_library_without_the_runtime_is_left_alone(tmp_path: Path) -> None:
    assert start(tmp_path, TORCH.format(asked=0), LIBRARY_WITHOUT_RUNTIME) == [0, ["context"]]


def test_torch_without_cuda_needs_none(tmp_path: Path) -> None:
    assert start(tmp_path, "seen = 'imported'") == ["imported", []]


def test_it_is_given_up_where_torch_does_not_import(tmp_path: Path) -> None:
    assert start(tmp_path, "raise ImportError('broken')", LIBRARY) == ["broken", []]


def test_none_is_begun_once_torch_is_there() -> None:
    import torch  # noqa: F401

    assert begin_context(Phases()) is None


def test_what_goes_wrong_is_left_to_others_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise PermissionError

    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    monkeypatch.setattr(early_context, "torch_cuda_library", fail)
    phases = Phases()
    early_context.EarlyContext(phases).wait()
    assert not said and not phases.seconds


def built(folder: Path, source: str) -> int:
    """The handle of a library of this code, loaded here."""
    library = folder / "built.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    handle: int = ctypes.CDLL(str(library))._handle
    return handle


def test_a_runtime_that_refuses_is_no_error(tmp_path: Path) -> None:
    source = "int cudaFree(void *p) { return 100; }"  # cudaErrorNoDevice
    assert make_context(built(tmp_path, source)) is False


def test_the_handle_of_cublas_is_given_back(tmp_path: Path) -> None:
    source = """
    static long one, given_back = 0;
    int cublasCreate_v2(void **p) { *p = &one; return 0; }
    int cublasDestroy_v2(void *p) { given_back += p == &one; return p != &one; }
    long count(void) { return given_back; }
    """
    handle = built(tmp_path, source)
    assert start_cublas(handle) and ctypes.CDLL("", handle=handle).count() == 1


@pytest.mark.parametrize("source", ["int nothing;", "int cublasCreate_v2(void **p) { return 3; }"])
def test_a_cublas_that_refuses_is_no_error(tmp_path: Path, source: str) -> None:
    assert start_cublas(built(tmp_path, source)) is False


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ('{"target": {"device": "cuda"}}', "cuda"),
        ('{"target": {"device": ["cuda"]}}', None),
        ('{"target": "cuda"}', None),
        ("[1]", None),
        ("[" * 100_000, None),
        ("\udcff", None),
        (None, None),
    ],
)
def test_the_device_of_a_manifest_is_read_as_far_as_it_can_be(
    tmp_path: Path, text: str | None, device: str | None
) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    assert device_of(tmp_path) == device
