"""What all tests share: the options and the markers."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chromium import FLAGS, chromium_path
from drawn import drawn_out
from run_seed import OUTSIDE_OF_GIT, run_seed

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Two workers with two OpenMP threads each on two cores wait for each other in spin loops: one thread a worker, set
# before torch is imported and inherited by subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# g++ spends most of a region's compile on C++ that calls its kernels. Optimizing that changes no result, and here it
# runs a few times.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

# Inductor builds three libraries to see whether the vector instructions of /proc/cpuinfo work: nine seconds on a new
# machine. Code that they do not run fails in the tests of the regions themselves.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A worker holds 900,000 objects: test items, torch, transformers. With Python's thresholds (700, 10, 10) scans of them
# took 2.5 of 21.8 s of CPU in the tests of mutations and matches. With these they take 0.8 s, and 10 MB more of memory.
# What collecting has made stays, and is not scanned at all: `pytest_collection_finish`.
gc.set_threshold(50_000, 20, 20)

# Files of more tests than this are a unit of work each: 1700 units in all.
MANY_TESTS = 20


@cache
def _has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False  # torch would say the same, and takes seconds to import
    import torch

    return torch.cuda.is_available()


# Without a GPU Triton interprets kernels. It looks here when they are imported, whichever test does that first.
if not _has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"
else:
    from ingot.backends.ptxas import use_ptxas

    use_ptxas()  # for kernels that tests launch by Triton


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")


class Backwards(pytest.Dir):
    """A folder whose last file is collected first."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        return reversed(list(super().collect()))


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """Every second worker imports the files of a folder from the last one on.

    In a fresh clone workers then seldom compile the same file. All test files take 16 s of CPU, most of it for pytest's
    rewriting of assertions.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return Backwards.from_parent(parent, path=path) if int(worker.removeprefix("gw")) % 2 else None


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Texts of thousands of characters are named by their length: names go from worker to worker, and into logs."""
    return f"{argname} of {len(val)}" if isinstance(val, (str, bytes)) and len(val) > 300 else None


# A run of at most this many files takes all of their cases, as one wants while editing.
FEW_FILES = 20


def _draws_files(config: pytest.Config, items: list[pytest.Item]) -> bool:
    """Whether this run takes a part of the files with the marker `one_in_file`: a run of the whole suite does, at a
    commit that draws. One of few files, of a marker (-m gpu) or of words (-k) does not."""
    chosen = config.option.markexpr or config.option.keyword
    return not chosen and run_seed() != OUTSIDE_OF_GIT and len({item.path for item in items}) > FEW_FILES


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # one order, whichever file a worker collected first
        items.sort(key=lambda item: item.path.parts)

    # Once for each item: 21,000 items in each worker, and pytest looks through four levels for a marker.
    marked: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        for name in {mark.name for mark in item.iter_markers()}:
            marked[name].append(item)

    if marked["slow"] and not config.getoption("--run-slow"):
        config.hook.pytest_deselected(items=marked["slow"])
        slow = set(marked["slow"])
        items[:] = [item for item in items if item not in slow]

    if not config.getoption("--run-slow"):
        left = set(items)
        drawn = {*marked["one_in"], *marked["one_in_file"]} & left
        others = drawn_out([item for item in items if item in drawn], files=_draws_files(config, items))
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]

    gpu = marked["gpu"]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))

    tensorrt = marked["tensorrt"]
    if tensorrt and not (_has_cuda() and find_spec("tensorrt")):
        for item in tensorrt:
            item.add_marker(pytest.mark.skip(reason="no TensorRT or no CUDA device"))

    browser = marked["browser"]
    if browser and not chromium_path() and "INGOT_REQUIRE_BROWSER" not in os.environ:
        for item in browser:
            item.add_marker(pytest.mark.skip(reason="no Chromium: apt-get install chromium"))

    # Files of many tests go to one worker each: pytest-xdist counts, after each test, what is left of every unit of
    # work, and nine thousand units take it seven seconds. The other tests come last, one by one, so that workers end
    # together.
    grouped, alone = set(marked["xdist_group"]), defaultdict[Path, list[pytest.Item]](list)
    for item in items:
        if item not in grouped:
            alone[item.path].append(item)
    for path, of_file in alone.items():
        if len(of_file) > MANY_TESTS:
            group = pytest.mark.xdist_group(path.relative_to(config.rootpath).as_posix())
            for item in of_file:
                item.add_marker(group)


def pytest_collection_finish() -> None:
    gc.freeze()
    # Where Hypothesis is in use, it draws by the commit too, as if --hypothesis-seed were given.
    drawing = sys.modules.get("hypothesis.core")
    if drawing is not None and drawing.global_force_seed is None:
        drawing.global_force_seed = random.Random(run_seed()).getrandbits(64)


@pytest.fixture(scope="session", autouse=True)
def ingot_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache of executables for all workers of a run, and never the user's."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ingot-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint by its name in `tiny.CHECKPOINTS`, written when first asked for."""
    from tiny import CHECKPOINTS  # imports torch, which reads the environment set above

    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = CHECKPOINTS[name].write(tmp_path_factory.mktemp("checkpoint") / name)
        return written[name]

    return get


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Callable[..., Path]:
    """The artifact of a tiny checkpoint, `artifact(name, backend=...)` and other options of `compile_model`.

    Each is compiled once per worker: tests that share one belong into one `xdist_group`.
    """
    compiled: dict[tuple[str, str], Path] = {}

    def get(name: str, **options: Any) -> Path:
        from tiny import compile_options

        from ingot import compile_model

        key = name, repr(sorted(options.items()))
        if key not in compiled:
            output = tmp_path_factory.mktemp("artifact") / f"{name}.ingot"
            compile_model(checkpoint(name), output, **{**compile_options(name), **options})
            compiled[key] = output
        return compiled[key]

    return get


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for tests with the marker `browser`. While it is open, this thread has a running event loop, so that
    `asyncio.run` fails: it ends with each module."""
    from playwright.sync_api import sync_playwright

    found = chromium_path()
    assert found, "INGOT_REQUIRE_BROWSER is set, and there is no Chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield opened
        opened.close()
