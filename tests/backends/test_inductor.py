"""The inductor backend: a region compiled once runs at every size; the cache keeps what was compiled, whole or not."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drawn import drawn, in_one_of
from every_op import DTYPES, L_MAX, SHARES, T_MAX, EveryOp, check_samples, every_op
from staged import BUCKET, staged, traced
from tiny import TINY

from ingot.backends.inductor.emit import Inductor
from ingot.backends.inductor.load import load
from ingot.compile.competing import backend_named
from ingot.compile.emitter import Emitter
from ingot.compile.executable_cache import build_executable, executable_folder, find_executable
from ingot.compile.identity import exe_key
from ingot.ir.artifact.plan import Executable
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Region, Stage
from ingot.ir.types import DTYPE_NAMES
from ingot.runtime.loading.load_context import on_one_device

Run = Callable[..., Sequence[torch.Tensor]]
TARGET = Target.detect("cpu")

# One compile serves the whole file.
pytestmark = pytest.mark.xdist_group("inductor")


@dataclass(frozen=True)
class Built:
    every: EveryOp
    region: Region
    executable: Executable
    run: Run

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = self.run(*(inputs[name] for name in self.every.body.input_types()))
        return dict(zip(self.every.outputs, found, strict=True))


def _emitter(jobs: int = 1) -> Emitter:
    return Emitter({"inductor": Inductor()}, TARGET, jobs)


@dataclass(frozen=True)
class Part:
    """What one region holds: every op in this dtype, with this share of its samples."""

    dtype: torch.dtype
    share: int

    def __str__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]}-{self.share}"


PARTS = [Part(*case) for case in itertools.product(DTYPES, range(SHARES))]


@pytest.fixture(scope="module", params=drawn(1, PARTS), ids=str)
def built(ingot_cache: Path, request: pytest.FixtureRequest) -> Built:
    """Every op in one region, compiled by a worker process into the cache, and loaded."""
    every = every_op([request.param.dtype], request.param.share)
    region = Region(every.body.name, every.body, "inductor")
    with _emitter() as emitter:
        executable = emitter.emit([region])[region.name]
        assert emitter.folders[executable.id] == executable_folder(executable.id)
        assert emitter.seconds.keys() == {executable.id}
    return Built(
        every,
        region,
        executable,
        load(executable, executable_folder(executable.id), on_one_device("cpu")),
    )


def test_the_signature_is_the_regions(built: Built) -> None:
    dtype = DTYPE_NAMES[built.every.samples[0][1]]
    assert built.executable.id == exe_key(built.region, Inductor(), TARGET) and built.executable.backend == "inductor"
    types = [str(value_type) for value_type in built.every.body.input_types().values()]
    assert list(built.executable.inputs) == types and f"{dtype}[T, 48]" in types
    strided = sum(not one.is_contiguous() for one in built.every.fixed.values())
    assert sum("; " in one for one in types) == strided
    outputs = [str(node.meta["type"]) for node in built.every.body.output_nodes().values()]
    assert list(built.executable.outputs) == outputs and f"{dtype}[T, 2, 8; 64, 8, 1]" in outputs


def test_every_op_on_its_samples(built: Built) -> None:
    results = built(built.every.inputs(tokens=5, rows=2))
    assert {op.name for op, *_ in built.every.samples} == {name for name, op in OPS.items() if op.fusible}
    check_samples(built.every, results)


def test_a_dtype_that_cxx_cannot_name_is_refused() -> None:
    op = OPS["quant_linear"]
    every = EveryOp(Program("e8m0", Stage.FUSED, {}))
    refused = 0
    for number, sample in enumerate(op.samples(torch.Generator().manual_seed(0), torch.bfloat16)):
        tensors = [arg for arg in sample.args if isinstance(arg, torch.Tensor)]
        args = [
            every.give(f"{number}.{place}", arg) if isinstance(arg, torch.Tensor) else arg
            for place, arg in enumerate(sample.args)
        ]
        claim = Inductor().claim([every.call(op, *args, **sample.kwargs)], TARGET, BUCKET)
        if any(arg.dtype is torch.float8_e8m0fnu for arg in tensors):
            refused += 1
            assert isinstance(claim, No) and "torch.float8_e8m0fnu" in claim.reason
        else:
            assert isinstance(claim, Yes)
    assert refused


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 1), (2, 2), (3, 1), (7, 7), (8, L_MAX), (64, 3), (T_MAX, L_MAX), (1, L_MAX), (T_MAX, 1)]
)
def test_any_size(built: Built, tokens: int, rows: int) -> None:
    """Compiled for any T and L: as near to float64 as the interpreter is, with the promised types and strides."""
    inputs = built.every.inputs(tokens, rows, seed=tokens)
    found = built(inputs)
    expected = interpret(built.every.body, inputs)
    exact = interpret(built.every.body, inputs, exact=True)
    for name, node in built.every.outputs.items():
        problem = node.meta["type"].mismatch(found[name], {"T": tokens, "L": rows})
        assert problem is None, f"{name}: {problem}"
        dtype = next((item for item in DTYPES if name.startswith(str(item).removeprefix("torch."))), None)
        if dtype is None:
            continue
        # Inside a region roundings may be left out, so the interpreter's bits are not the measure: its error is.
        problem = breach(
            Numerics.ROUNDING, Measured(expected[name], exact[name]), Measured(found[name], exact[name]), dtype
        )
        assert problem is None, f"{name}: {problem}"


def test_the_same_call_gives_the_same_bits(built: Built) -> None:
    inputs = built.every.inputs(13, 2)
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    first = {name: tensor.clone() for name, tensor in built(inputs).items()}
    built(built.every.inputs(5, 2, seed=9))
    second = built(inputs)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert all(torch.equal(inputs[name], tensor) for name, tensor in kept.items()), "inputs are only read"


def test_results_are_new_tensors(built: Built) -> None:
    """A result must outlive the next call: the executor hands it on without a copy."""
    first = built(built.every.inputs(13, 2))
    kept = {name: tensor.clone() for name, tensor in first.items()}
    built(built.every.inputs(13, 2, seed=1))
    assert all(torch.equal(first[name], tensor) for name, tensor in kept.items())


def test_a_library_that_does_not_load(built: Built, tmp_path: Path) -> None:
    (tmp_path / built.executable.files[0]).write_bytes(b"\x7fELF no library")
    with pytest.raises(BackendError, match="the library does not load") as caught:
        load(built.executable, tmp_path, on_one_device("cpu"))
    assert built.executable.files[0] in caught.value.where


# Claims and the toolchain.


def test_claims() -> None:
    _, lowered = staged(traced(TINY["qwen3-biased"].config))
    other = TARGET.model_copy(update={"device": "cuda"})
    for node in lowered.fused.calls():
        name = getattr(node.target, "_schema", None) and node.target._schema.name.removeprefix("ingot::")
        answer = Inductor().claim([node], TARGET, BUCKET)
        if name in OPS and not OPS[name].fusible:
            assert isinstance(answer, No) and answer.reason == f"ingot.{name} is not fusible"
        else:
            assert isinstance(answer, Yes) and not answer.batch_invariant
        refused = Inductor().claim([node], other, BUCKET)
        assert isinstance(refused, No) and refused.reason == "not for device 'cuda'"
    outside = {name for name, op in OPS.items() if not op.fusible}
    assert outside == {
        "embedding",
        "attention",
        "choose_positions",
        "dequantize",
        "round_rows",
        "rounded_linear",
        "paged_attention",
        "paged_choose_positions",
        "partial_attention",
        "sparse_attention",
        "step_attention",
        "step_latent_attention",
        "pool",
        "kv_append",
        "latent_attention",
        "qk_norm_rope_append",
        "append_attention",
        "select_rows",
        "sample",
        "feed",
        "page_slots",
        "accept_drafts",
        "read_rows",
        "accept_tree",
        "move_slots",
        "lora_shrink",
        "lora_expand",
        "take_block",
        "tree_ancestors",
        "tree_positions",
        "fill_block",
        "take_drafts",
        "write_rows",
        "advance",
        "count_tokens",
        "top_logprobs",
        "experts",
        "route",
        "sparse_mixer",
        "state_copy",
        "state_move",
        "state_zero",
        *(name for name, op in OPS.items() if op.across),
    }


def test_toolchain_and_sources() -> None:
    backend = Inductor()
    assert backend.toolchain()["torch"] == torch.__version__ and backend.toolchain()["c++"]
    names = {path.name for path in backend.sources()}
    assert {"emit.py", "dense.py", "registry.py"} <= names and all(path.is_file() for path in backend.sources())


SMALL = parse_program("""program small stage=FUSED
dim T in [1, 4]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, 3) : f32[T, 8]
return y=%mul
""")


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that says its version and then compiles nothing; and a cache of its own."""
    path = tmp_path / "bad-g++"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo "bad-g++ 1.0";; *) echo "no wits left" >&2; exit 1;; esac\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return path


@in_one_of(3)
def test_a_compiler_that_fails_is_quoted(broken_compiler: Path, tmp_path: Path) -> None:
    with _emitter() as emitter, pytest.raises(BackendError) as caught:
        emitter.emit([Region("small", SMALL, "inductor")])
    assert "inductor cannot compile region 'small'" in caught.value.what and "no wits left" in caught.value.what
    assert "--backend reference" in caught.value.hint
    assert not list((tmp_path / "cache" / "exe").glob("*")), "nothing half-built is kept"
    assert not [path for path in (tmp_path / "cache" / "build").glob("*") if path.is_dir()]


# The worker process.


def _dying_python(folder: Path, script: str) -> str:
    """A stand-in for the interpreter that workers are started with."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_worker_that_dies_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    words = "read line; echo '{\"ready\": true}'; read line; echo 'terminate called: out of wits' >&2; exit 7"
    monkeypatch.setattr(sys, "executable", _dying_python(tmp_path, words))
    with _emitter() as emitter:
        emitter.warm_up()
        with pytest.raises(BackendError) as caught:
            emitter.emit([Region("small", SMALL, "inductor")])
    assert caught.value.what == "the inductor compiler's process died with status 7"
    assert caught.value.where == "terminate called: out of wits"


def test_a_worker_that_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As by the kernel when memory runs out: before it was asked, or while it works."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    for script in ("kill -9 $$", "read line; read line; kill -9 $$"):
        monkeypatch.setattr(sys, "executable", _dying_python(tmp_path, script))
        with _emitter(jobs=2) as emitter, pytest.raises(BackendError, match="died with status -9"):
            emitter.emit([Region("small", SMALL, "inductor"), Region("again", SMALL, "inductor")])


def test_workers_end_with_the_emitter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", _dying_python(tmp_path, "sleep 600"))
    with _emitter(jobs=4) as emitter:
        emitter.warm_up()  # half of them
        processes = [worker._process for worker in emitter._workers]
        assert len(processes) == 2 and all(process.poll() is None for process in processes)
    assert all(process.returncode == -9 for process in processes)


def test_only_region_compilers_have_workers() -> None:
    with Emitter({name: backend_named(name, "cpu") for name in ("reference", "rowwise")}, TARGET, 4) as emitter:
        emitter.warm_up()
        assert emitter._workers == [] and emitter.emit([]) == {}


# The cache of executables.


class _Counting(Inductor):
    """Writes a library of its own in a moment, and a line into `log` each time."""

    def __init__(self, log: Path, seconds: float = 0.0) -> None:
        self.log, self.seconds = log, seconds

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        assert not list(directory.iterdir()), "a folder of its own"
        time.sleep(self.seconds)
        (directory / "region.so").write_bytes(b"code")
        return Executable(
            id=key, backend=self.name, inputs=("f32[T, 8]",), outputs=("f32[T, 8]",), files=("region.so",)
        )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_in_the_cache_is_not_built_again(cache: Path, tmp_path: Path) -> None:
    backend = _Counting(tmp_path / "log")
    assert find_executable("k") is None
    first = build_executable(backend, SMALL, "k", TARGET)
    assert build_executable(backend, SMALL, "k", TARGET) == first == find_executable("k")
    assert len(backend.log.read_text().splitlines()) == 1
    assert (cache / "exe").stat().st_mode & 0o777 == 0o700, "it holds native code that will run"
    assert not [path for path in (cache / "build").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "region.so").write_bytes(b"c0de"),
        lambda folder: (folder / "region.so").write_bytes(b""),
        lambda folder: (folder / "region.so").unlink(),
        lambda folder: (folder / "executable.json").unlink(),
        lambda folder: (folder / "executable.json").write_text("{"),
        lambda folder: (folder / "executable.json").write_text("[]"),
        lambda folder: (folder / "executable.json").write_text('{"executable": {}, "digests": {}}'),
        lambda folder: (folder / "executable.json").write_text(
            (folder / "executable.json").read_text().replace('"region.so": "', '"other.so": "')
        ),
        lambda folder: shutil.rmtree(folder) or folder.mkdir(),
    ],
    ids=["changed", "empty", "missing", "no record", "cut record", "a list", "no fields", "no digest", "empty folder"],
)
def test_a_damaged_entry_is_built_again(cache: Path, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    backend = _Counting(tmp_path / "log")
    first = build_executable(backend, SMALL, "k", TARGET)
    damage(executable_folder("k"))
    assert find_executable("k") is None
    assert build_executable(backend, SMALL, "k", TARGET) == first == find_executable("k")
    assert (executable_folder("k") / "region.so").read_bytes() == b"code"
    assert len(backend.log.read_text().splitlines()) == 2


def test_what_a_killed_process_left_is_cleared(cache: Path, tmp_path: Path) -> None:
    (cache / "build" / "k").mkdir(parents=True)
    (cache / "build" / "k" / "half.o").write_bytes(b"half")
    build_executable(_Counting(tmp_path / "log"), SMALL, "k", TARGET)
    assert sorted(path.name for path in executable_folder("k").iterdir()) == ["executable.json", "region.so"]


def test_a_build_that_fails_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    class Failing(_Counting):
        def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
            (directory / "half.o").write_bytes(b"half")
            raise BackendError("no wits left")

    with pytest.raises(BackendError, match="no wits left"):
        build_executable(Failing(tmp_path / "log"), SMALL, "k", TARGET)
    assert find_executable("k") is None and not (cache / "build" / "k").exists() and not executable_folder("k").exists()
    build_executable(_Counting(tmp_path / "log"), SMALL, "k", TARGET)
    assert find_executable("k") is not None


_RACER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("racer", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print("ready", flush=True)
sys.stdin.readline()
module.build_executable(module._Counting(Path({log!r}), seconds=1.0), module.SMALL, "k", module.TARGET)
print("built", flush=True)
"""


@in_one_of(3)
def test_two_processes_build_one_key_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = _RACER.format(file=__file__, log=str(log))
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as racer:
        assert racer.stdin is not None and racer.stdout is not None
        try:
            assert racer.stdout.readline() == "ready\n"
            racer.stdin.write("go\n")  # it is loaded, as this process is: both are there when the first one builds
            racer.stdin.flush()
            build_executable(_Counting(log, seconds=1.0), SMALL, "k", TARGET)
            assert racer.stdout.readline() == "built\n" and racer.wait(30) == 0
        finally:
            racer.kill()
    assert len(log.read_text().splitlines()) == 1, "the second one waited and found it"
    record = json.loads((executable_folder("k") / "executable.json").read_text())
    assert record["executable"]["id"] == "k"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_library_has_the_same_bytes_when_built_again(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one path, on one machine: also without any of the compiler's own caches."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    libraries = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"inductor-{attempt}"))
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        with _emitter() as emitter:
            executable = emitter.emit([built.region])[built.region.name]
            assert not emitter.hits
            libraries.append((emitter.folders[executable.id] / executable.files[0]).read_bytes())
    assert libraries[0] == libraries[1]
