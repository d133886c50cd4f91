"""Backends of other packages: what a package does wrong is an error that names it, and a compile goes on without it."""

import importlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from backend_table import patch_entry
from drawn import in_one_of
from installed import describe, install
from tiny import TINY

import ingot.cli.main as cli
from ingot import compile_model
from ingot.backends.outside import outside_entry
from ingot.backends.table import find_entry, outside_names
from ingot.compile.competing import available, backend_named, competitors
from ingot.compile.driver import compile_cached
from ingot.compile.emitter import Emitter
from ingot.compile.identity import exe_document, exe_key
from ingot.compile.outside_backend import backend_facts
from ingot.error_text import decode_error, encode_error
from ingot.ir.artifact.plan import Executable
from ingot.ir.backend import Backend, Compiler, RegionCompiler, Tunable
from ingot.ir.errors import OptionError, TargetError, UserBackendError
from ingot.ir.machine.target import Target
from ingot.ir.parse import parse_program
from ingot.ir.program import Region
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.loading.loaders import find_op, load_executable

pytestmark = pytest.mark.one_in_file(3)

TARGET = Target.detect("cpu")
BODY = parse_program(
    "program gates stage=FUSED\ndim T in [1, 8]\ninput gate: f32[T, 4]\ninput up: f32[T, 4]\n"
    "%out = ingot.silu_mul(%gate, %up) : f32[T, 4]\nreturn out=%out\n"
)
INIT = """
from ingot.backends.outside import PackageBackend
BACKEND = PackageBackend(emit={"cpu": "PACKAGE.emit:Mine"}, executable="PACKAGE.load:load")
"""
EMIT = """
from pathlib import Path
from ingot.ir import ops
from ingot.ir.artifact.plan import Executable
from ingot.ir.backend import No, Yes
from ingot.ir.ops import op_of


class Mine:
    name = "mine"
    compiles_calls = False

    def claim(self, nodes, target, bucket):
        return Yes(0.1) if all(op_of(node.target) is ops.silu_mul for node in nodes) else No("it has silu_mul")

    def cover(self, nodes):
        return [[node] for node in nodes]

    def warm_up(self):
        pass

    def sources(self):
        return [Path(__file__)]

    def toolchain(self):
        return {"c++": "7"}

    def emit(self, body, key, target, directory):
        (directory / "code").write_text("silu")
        types = tuple(str(one) for one in body.input_types().values())
        results = tuple(str(node.meta["type"]) for node in body.output_nodes().values())
        return Executable(id=key, backend=self.name, inputs=types, outputs=results, files=("code",))

    def workspace(self, body, executable, directory, sizes, threads):
        return 4096
"""
LOAD = """
from ingot.ir.ops import OPS


def load(executable, directory, context):
    assert (directory / "code").read_text() == "silu"
    return lambda gate, up: [OPS["silu_mul"].reference(gate, up)]
"""


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of this process and of those that it starts."""
    folder = tmp_path / "importable"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder), *sys.path]))
    outside_entry.cache_clear()
    yield folder
    outside_entry.cache_clear()


Install = Callable[..., str]


@pytest.fixture
def package(importable: Path, request: pytest.FixtureRequest) -> Install:
    """Install a package with the backend `mine`; each of `changes` replaces a text in one of its modules."""

    def installed(name: str = "mine", **changes: tuple[str, str]) -> str:
        package = f"pack_{abs(hash(request.node.nodeid)) % 10**8}"  # modules are imported once a process
        texts = {"__init__": INIT, "emit": EMIT, "load": LOAD}
        for module, (old, new) in changes.items():
            key = "__init__" if module == "init" else module
            assert old in texts[key]
            texts[key] = texts[key].replace(old, new)
        init = texts.pop("__init__").replace("PACKAGE", package)
        install(importable, package, {"ingot.backends": {name: f"{package}:BACKEND"}}, **texts)
        (importable / package / "__init__.py").write_text(init)
        return package.replace("_", "-")

    return installed


def said(error: UserBackendError, package: str) -> str:
    """The message, which names the backend and its package with the version."""
    assert error.backend == "mine" and error.what.startswith(f"the backend 'mine' of the package {package} 1.0 ")
    return str(error)


def test_a_backend_is_found_and_described(package: Install) -> None:
    name = package()
    assert outside_names() == ("mine",)
    backend = backend_named("mine", "cpu")
    assert isinstance(backend, RegionCompiler)
    assert backend_facts(backend) == {"name": "mine", "kind": "region compiler", "package": name, "version": "1.0"}
    found = competitors("auto", TARGET)
    assert found.backends[-1].name == "mine" and not found.dropped and not found.asked
    named = competitors("mine", TARGET)
    assert [one.name for one in named.backends] == ["mine", "reference", "rowwise"] and named.asked == {"mine"}
    both = competitors("reference,mine", TARGET)
    assert [one.name for one in both.backends] == ["reference", "rowwise", "mine"]
    assert (both.choice, both.asked) == ("reference,mine", {"reference", "mine"})
    assert [one.name for one in available(TARGET)[0]][-1] == "mine"


def test_a_backend_on_request_does_not_compete_unasked(package: Install) -> None:
    package(init=("executable=", "on_request=True, executable="))
    assert "mine" not in [one.name for one in competitors("auto", TARGET).backends]
    assert "mine" in [one.name for one in competitors("auto,mine", TARGET).backends]


def test_the_key_covers_the_package(package: Install, importable: Path) -> None:
    name = package()
    region = Region("gates", BODY, "mine")
    first = exe_document(region, backend_named("mine", "cpu"), TARGET)
    folder = name.replace("-", "_")
    assert first["package"]["name"] == name and first["package"]["version"] == "1.0"
    assert set(first["package"]["files"]) == {f"{folder}/{one}.py" for one in ("__init__", "emit", "load")}
    key = exe_key(region, backend_named("mine", "cpu"), TARGET)
    (importable / folder / "helper.c").write_text("int x;")
    assert exe_key(region, backend_named("mine", "cpu"), TARGET) != key
    (importable / folder / "helper.c").unlink()
    assert exe_key(region, backend_named("mine", "cpu"), TARGET) == key
    (importable / f"{folder}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.1\n")
    outside_entry.cache_clear()
    assert exe_key(region, backend_named("mine", "cpu"), TARGET) != key


def _made(tmp_path: Path) -> tuple[Backend, Executable, Path]:
    backend = backend_named("mine", "cpu")
    assert isinstance(backend, Compiler)
    folder = tmp_path / "built"
    folder.mkdir(exist_ok=True)
    return backend, backend.emit(BODY, "key", TARGET, folder), folder


def test_serving_imports_the_load_side_alone(package: Install, tmp_path: Path) -> None:
    folder = package().replace("-", "_")
    _, executable, built = _made(tmp_path)
    for name in [name for name in sys.modules if name.startswith(folder)]:
        del sys.modules[name]
    outside_entry.cache_clear()
    run = load_executable(executable, built, on_one_device("cpu"))
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(run(gate, up)[0], torch.nn.functional.silu(gate) * up)
    assert {name for name in sys.modules if name.startswith(folder)} == {folder, f"{folder}.load"}


# Faults at import, in the description, and in the class.

_KIND = "    compiles_calls = False\n"
_TUNES = "    choices = with_choices = measures = measure = print\n"
_GONE = "    def tuning_sources(self): return [Path('gone.py')]\n"

DESCRIBED = {
    "no import": ({"init": ("from ingot", "1 / 0; from ingot")}, "failed to be imported: ZeroDivisionError"),
    "another thing": ({"init": ("BACKEND =", "BACKEND = 7 or")}, "is 7"),
    "another device": ({"init": ('"cpu":', '"tpu":')}, "is for tpu"),
    "no place": ({"init": (".emit:Mine", ".emit")}, "has the place"),
    "no emit module": ({"init": (".emit:", ".gone:")}, "failed to be imported: ModuleNotFoundError"),
    "an error in emit": ({"emit": ("from pathlib", "1 / 0\nfrom pathlib")}, "failed to be imported: ZeroDivision"),
    "an error in making": (
        {"emit": ("    compiles_calls", "    def __init__(self): 1 / 0\n    compiles_calls")},
        "be made",
    ),
    "another name": ({"emit": ('name = "mine"', 'name = "yours"')}, "has the name 'yours' in its class"),
    "no claim": ({"emit": ("def claim", "def claims")}, "has no method claim"),
    "half a compiler": ({"emit": ("def workspace", "def work")}, "has emit, and no workspace"),
    "half a region compiler": ({"emit": ("def warm_up", "def warm")}, "has cover, and no warm_up"),
    "half a tuner": ({"emit": (_KIND, f"{_KIND}{_TUNES}")}, "has choices, and no tuning_sources"),
    "no kind": ({"emit": ("compiles_calls = False", "pass")}, "does not say whether it compiles_calls"),
    "nothing loads it": ({"init": (', executable="PACKAGE.load:load"', "")}, "names no function that loads them"),
    "no compiler here": ({"emit": ('{"c++": "7"}', "1 / 0")}, "failed to answer toolchain: ZeroDivisionError"),
}


@pytest.mark.parametrize("kind", DESCRIBED)
def test_a_backend_that_cannot_be_used(kind: str, package: Install) -> None:
    changes, message = DESCRIBED[kind]
    name = package(**changes)
    with pytest.raises(UserBackendError) as caught:
        competitors("mine", TARGET).backends[0].toolchain()  # type: ignore[attr-defined]
    assert message in said(caught.value, name)
    found = competitors("auto", TARGET)
    assert "mine" not in [one.name for one in found.backends] and message in found.dropped["mine"]
    assert message in available(TARGET)[1]["mine"]


def test_a_folder_that_stands_for_the_package_is_named(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the folder of its project: it has the same name, and no __init__.py."""
    project = importable / "pack_folder"
    project.mkdir()
    describe(importable, "pack-folder", "1.0")
    info = importable / "pack_folder-1.0.dist-info" / "entry_points.txt"
    info.write_text("[ingot.backends]\nmine = pack_folder:BACKEND\n")
    with pytest.raises(UserBackendError, match="no attribute 'BACKEND'") as caught:
        find_entry("mine")
    assert caught.value.where == f"pack_folder:BACKEND of {project}"


@pytest.mark.parametrize("name", ["Mine", "my-own", "auto", "0mine"])
def test_a_name_that_cannot_be_used(name: str, package: Install) -> None:
    package(name)
    with pytest.raises(UserBackendError, match="has a name that cannot be used"):
        find_entry(name)


def test_two_packages_with_one_name(importable: Path) -> None:
    for one in ("pack_first", "pack_second"):
        install(importable, one, {"ingot.backends": {"mine": f"{one}:BACKEND"}})
    with pytest.raises(UserBackendError, match="has the name of another package's backend") as caught:
        competitors("mine", TARGET)
    assert "pack_first:BACKEND" in caught.value.where and "pack_second:BACKEND" in caught.value.where


def test_a_backend_of_ingots_name_is_not_taken(importable: Path) -> None:
    install(importable, "pack_cpu", {"ingot.backends": {"cpu": "pack_cpu:BACKEND"}})
    assert outside_names() == () and find_entry("cpu").package is None  # type: ignore[union-attr]


def test_unknown_names(package: Install) -> None:
    package()
    for choice in ("yours", "auto,yours", "mine,yours", "auto,", ""):
        with pytest.raises(OptionError, match="unknown backend") as caught:
            competitors(choice, TARGET)
        assert "reference, mine" in caught.value.expected


# Faults in what it answers.

_WRITE = '(directory / "code").write_text("silu")'
ANSWERS = {
    "a claim that is none": ({"emit": ("return Yes(0.1) if", "return True if")}, "answered a claim of ingot.silu_mul"),
    "a cost that is none": ({"emit": ("Yes(0.1)", "Yes(float('nan'))")}, "at the cost nan"),
    "a claim that raises": ({"emit": ("return Yes(0.1) if", "return [][0] if")}, "failed to answer claim: IndexError"),
    "no emit": ({"emit": (_WRITE, "1 / 0")}, "claims ingot.silu_mul, and cannot emit it: ZeroDivisionError"),
    "no executable": ({"emit": ("return Executable(", "return dict(")}, "emitted {'id'"),
    "another id": ({"emit": ("id=key", "id='k'")}, "emitted an executable with the id k"),
    "other types": ({"emit": ("outputs=results", "outputs=types")}, "emitted code of (f32[T, 4], f32[T, 4]) to"),
    "no files": ({"emit": ('files=("code",)', "files=()")}, "emitted no files"),
    "a file outside": ({"emit": ('("code",)', '("../code",)')}, "'../code', which is outside its folder"),
    "an absolute file": ({"emit": ('("code",)', '("/etc/hosts",)')}, "'/etc/hosts', which is outside its folder"),
    "a link outside": ({"emit": (_WRITE, '(directory / "code").symlink_to("/etc/hosts")')}, "outside its folder"),
    "a file that is not there": ({"emit": (_WRITE, "pass")}, "did not write the file 'code'"),
    "a load that raises": ({"load": ("assert", "assert not")}, "failed to load the executable key: AssertionError"),
    "a load of nothing": ({"load": ("return lambda gate, up:", "return None and")}, "loaded None"),
    "a call that raises": ({"load": ("gate, up)]", "gate)]")}, "failed to run the executable key: TypeError"),
    "one result too many": ({"load": ("up)]", "up), up]")}, "returned 2 results from the executable key"),
    "a bare tensor": (
        {"load": ('[OPS["silu_mul"].reference(gate, up)]', 'OPS["silu_mul"].reference(gate, up)')},
        "returned a Tensor from",
    ),
    "a wrong shape": ({"load": ("up)]", "up)[:1]]")}, "with shape [1, 4], expected f32[T, 4]"),
    "a wrong dtype": ({"load": ("up)]", "up).double()]")}, "with dtype f64, expected f32"),
    "a wrong stride": ({"load": ("up)]", "up).T.contiguous().T]")}, "with strides [1, 2], expected row-major"),
    "no bytes": ({"emit": ("return 4096", "return None")}, "a call allocates None bytes"),
    "other calls covered": ({"emit": ("for node in nodes]", "for node in nodes[1:]]")}, "covers other calls"),
    "sources that are gone": ({"emit": ("[Path(__file__)]", "[Path('gone.py')]")}, "names gone.py among its sources"),
    "a tuner that is gone": ({"emit": (_KIND, f"{_KIND}{_TUNES}{_GONE}")}, "names gone.py among its sources"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_wrong_answer(kind: str, package: Install, tmp_path: Path) -> None:
    changes, message = ANSWERS[kind]
    name = package(**changes)
    calls = list(BODY.calls())
    with pytest.raises(UserBackendError) as caught:
        backend = backend_named("mine", "cpu")
        assert isinstance(backend, RegionCompiler)
        backend.claim(calls, TARGET, BODY.bucket)  # type: ignore[arg-type]
        backend.cover(calls)
        backend.sources()
        if isinstance(backend, Tunable):
            backend.tuning_sources()
        _, executable, folder = _made(tmp_path)
        backend.workspace(BODY, executable, folder, {"T": 8}, 1)
    assert message in said(caught.value, name)


def test_the_name_of_the_backend_crosses_a_process_boundary(package: Install, tmp_path: Path) -> None:
    package(emit=(_WRITE, "1 / 0"))
    with pytest.raises(UserBackendError) as caught:
        _made(tmp_path)
    again = decode_error(json.loads(json.dumps(encode_error(caught.value))))
    assert isinstance(again, UserBackendError) and again.backend == "mine" and str(again) == str(caught.value)


def test_functions_of_ops_need_no_build(package: Install) -> None:
    package(
        init=('executable="PACKAGE.load:load"', 'find_op="PACKAGE.load:find"'),
        emit=("    compiles_calls = False", "    def dry_run(self, node): return ops.silu_mul.costliest"),
        load=(
            "def load(",
            "def find(target): return (lambda gate, up: gate) if target == 'ingot.silu_mul' else 1 / 0\n\n\ndef load(",
        ),
    )
    assert find_op("ingot.silu_mul", "mine")(1, 2) == 1
    with pytest.raises(UserBackendError, match=r"failed to find the op ingot\.linear: ZeroDivisionError"):
        find_op("ingot.linear", "mine")


# A whole compile.

OPTIONS = dict(max_seq_len=40, max_batch=2, max_tokens=16, jobs=1)


@in_one_of(2)
def test_a_compile_goes_on_without_a_backend_that_fails(
    package: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend that --backend does not name. Its worker process crashes, so no exception gives a reason."""
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    name = package(emit=(_WRITE, "import os; os._exit(7)"))
    source = TINY["llama-plain"].write(tmp_path / "checkpoint")
    for other in ("inductor", "cpu"):  # they would compile for minutes
        patch_entry(monkeypatch, other, emit={}, competing={})
    report = compile_model(source, tmp_path / "m.ingot", **OPTIONS)  # type: ignore[arg-type]
    (note,) = [one for one in report.notes if "mine" in one]
    assert note.startswith("compiled without the backend 'mine': ") and f"package {name} 1.0 failed" in note
    assert report.nodes_per_backend.keys() == {"reference"}
    options = json.loads((tmp_path / "m.ingot" / "request.json").read_text())["identity"]["options"]
    assert options["backends"] == ["reference", "rowwise"]
    # The cache has it by the key of what compiled it, so a package that works by then is used.
    warned: list[str] = []
    monkeypatch.setattr(logging.getLogger("ingot"), "warning", lambda text, *given: warned.append(text % given))
    cached = compile_cached(source, **OPTIONS)
    assert compile_cached(source, **OPTIONS) == cached
    key = json.loads((tmp_path / "m.ingot" / "manifest.json").read_text())["request_key"]
    assert cached.name == f"{key}.ingot" and [path.name for path in cached.parent.glob("*.ingot")] == [cached.name]
    assert [text.partition(": ")[0] for text in warned] == ["compiled without the backend 'mine'"] * 2
    # Named, its failure ends the compile.
    command = [str(source), "-o", str(tmp_path / "n.ingot"), "--backend", "auto,mine"]
    command += ["--max-batch", "2", "--max-tokens", "16", "--max-seq-len", "40", "-j", "1"]
    assert cli.run(cli.COMPILE_MODEL, command) == cli.BAD_INPUT
    assert f"error: the backend 'mine' of the package {name} 1.0 failed" in capsys.readouterr().err
    assert not (tmp_path / "n.ingot").exists()


@in_one_of(2)
def test_a_model_from_compile_to_another_version(
    package: Install, importable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    name = package()
    source = TINY["llama-plain"].write(tmp_path / "checkpoint")
    report = compile_model(source, tmp_path / "m.ingot", backend="mine", **OPTIONS)  # type: ignore[arg-type]
    assert report.nodes_per_backend["mine"] and not report.no_golden_run
    manifest = json.loads((tmp_path / "m.ingot" / "manifest.json").read_text())
    assert manifest["versions"][name] == "1.0"
    assert load_artifact(tmp_path / "m.ingot", num_pages=8).plan.executables
    info = importable / f"{name.replace('-', '_')}-1.0.dist-info"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.1\n")
    with pytest.raises(TargetError, match=f"{name} 1.0, and the version 1.1 is installed") as caught:
        load_artifact(tmp_path / "m.ingot", num_pages=8)
    assert f"pip install '{name}==1.0'" in caught.value.hint
    shutil.rmtree(info)
    importlib.invalidate_caches()
    with pytest.raises(TargetError, match=f"{name} 1.0, and it is not installed"):
        load_artifact(tmp_path / "m.ingot", num_pages=8)


def test_a_worker_that_dies_is_the_packages_fault(
    package: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = package()
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread line; echo '{\"ready\": true}'; read line; echo 'out of wits' >&2; exit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    backends = {"mine": backend_named("mine", "cpu")}
    with Emitter(backends, TARGET, 1) as emitter, pytest.raises(UserBackendError) as caught:
        emitter.emit([Region("gates", BODY, "mine")])
    text = said(caught.value, name)
    assert "process died with status 7" in text and "out of wits" in text
