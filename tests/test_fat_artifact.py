"""Fat artifacts: one model compiled for several targets, with one set of weights, and a variant chosen at load."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sm_90 import unplug

import ingot.ir.machine.target
import ingot.runtime.loading.variants
from ingot import LLM, CompileReport, IngotError, SamplingParams, compile_model, open_artifact
from ingot.cli.main import INGOT, run
from ingot.compile.driver import compile_cached
from ingot.compile.targets import fat_key, read_requests
from ingot.debug.why_miss import identity_of
from ingot.ir.artifact.manifest import GOLDEN, SCHEMA_VERSION
from ingot.ir.errors import ArtifactError, OptionError, TargetError
from ingot.ir.machine.gpus import TYPICAL, Gpu
from ingot.runtime.loading.loader import load_artifact

pytestmark = pytest.mark.one_in_file(3)

NAME = "llama-plain"
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")
OPTIONS: dict[str, Any] = {"backend": "reference", "max_batch": 4, "max_tokens": 64, "max_seq_len": 64, "jobs": 1}
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]


def plug(patch: pytest.MonkeyPatch, gpu: Gpu | None) -> None:
    """A machine with this GPU, or without one, wherever the tests run."""
    unplug(patch)
    if gpu is not None:
        patch.setattr(ingot.ir.machine.target, "find_gpu", lambda: gpu)
    patch.setattr(ingot.runtime.loading.variants, "find_gpu", ingot.ir.machine.target.find_gpu)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, None)


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> CompileReport:
    """An artifact for a CPU and three GPUs, of references alone."""
    with pytest.MonkeyPatch.context() as patch:
        plug(patch, None)
        output = tmp_path_factory.mktemp("fat") / "a.ingot"
        return compile_model(checkpoint(NAME), output, target=",".join(TARGETS), **OPTIONS)


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> CompileReport:
    return compile_model(checkpoint(NAME), tmp_path_factory.mktemp("plain") / "a.ingot", target="cpu", **OPTIONS)


@pytest.fixture
def copy(made: CompileReport, tmp_path: Path) -> Path:
    return shutil.copytree(made.output, tmp_path / "copy.ingot")


def tokens(path: Path) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in LLM(path).generate(list(PROMPTS), params)]


def test_the_cpu_variant_generates_what_a_cpu_compile_does(made: CompileReport, plain: CompileReport) -> None:
    assert tokens(made.output) == tokens(plain.output) == tokens(made.output / "variants" / "cpu")


def test_each_variant_is_the_artifact_of_its_target(made: CompileReport, plain: CompileReport) -> None:
    assert tuple(made.variants) == TARGETS
    for name, report in made.variants.items():
        artifact = open_artifact(made.output, variant=name)
        assert (artifact.manifest.target["name"], artifact.build_id) == (name, report.build_id)
        artifact.verify_files()
        assert report.tried == artifact.manifest.tried == (name in ("cpu", "sm_90"))
        assert (report.output / GOLDEN).exists() == (name == "cpu")
        assert artifact.read_text("program.ir") and artifact.trace
    assert made.variants["cpu"].request_key == plain.request_key, "compiling for further targets changes no variant"
    assert identity_of(open_artifact(made.output)) == identity_of(open_artifact(plain.output))


def test_weights_are_stored_once(made: CompileReport, plain: CompileReport) -> None:
    files = [path for path in made.output.rglob("*.safetensors")]
    assert {path.parent for path in files} == {made.output / "weights"}
    assert sum(path.stat().st_size for path in files) == sum(
        path.stat().st_size for path in plain.output.rglob("*.safetensors")
    )
    assert made.weight_bytes == plain.weight_bytes
    assert not list((made.output / "variants").rglob("tokenizer"))
    # A file that two variants have is in the first one's folder: their programs are the same.
    for name in ("sm_90", "sm_100"):
        assert not (made.output / "variants" / name / "program.ir").exists()


def test_layouts_that_differ_are_stored_each_once(tmp_path: Path) -> None:
    import torch

    from ingot.compile.packing import Wanted, pack_weights
    from ingot.compile.publish import ArtifactWriter, VariantFiles
    from ingot.ir.program import ParamSpec
    from ingot.ir.recipe import cast, source
    from ingot.ir.types import TensorType

    wide = ParamSpec(TensorType(torch.float32, (4,)), source("x"))
    narrow = ParamSpec(TensorType(torch.float16, (4,)), cast(source("x"), torch.float16))
    with ArtifactWriter(tmp_path / "a.ingot") as writer:
        params = {"cpu": {"a": wide, "b": wide}, "sm_90": {"a": narrow, "c": wide}, "sm_100": {"a": narrow, "c": wide}}
        wanted = {name: Wanted(one, VariantFiles(writer, name)) for name, one in params.items()}
        packed = pack_weights(wanted, lambda name: torch.arange(4.0), writer)
        index = {name: json.loads((writer.path(f"variants/{name}/weights.json")).read_text()) for name in params}
    assert (packed.tensors, packed.params) == (2, 6)
    assert index["cpu"]["a"]["file"] == index["sm_90"]["c"]["file"] == "weights/00000.safetensors"
    assert index["cpu"]["b"]["same_as"] == "a"
    assert index["sm_90"]["a"]["file"] == index["sm_100"]["a"]["file"] == "weights/sm_90+sm_100/00000.safetensors"


CHOOSE = """
import ctypes, sys
from pathlib import Path


class Driver:
    def __getattr__(self, function):
        def call(*arguments):
            if function == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {75: 9, 76: 0}.get(arguments[1], 1)
            elif function == "cuDeviceGetName":
                arguments[0].value = b"a GPU"
            elif function == "cuDriverGetVersion":
                arguments[0]._obj.value = 13010
            return 0

        return call


real = ctypes.CDLL
ctypes.CDLL = lambda name, *rest, **more: Driver() if name == "libcuda.so.1" else real(name, *rest, **more)
if sys.argv[2]:  # a build of torch without CUDA
    import ingot.ir.machine.find_gpu as find_gpu
    run = find_gpu.runpy.run_path
    find_gpu.runpy.run_path = lambda path: {**run(path), "cuda": None}
from ingot.ir.errors import TargetError
from ingot.serve.find_artifact import find_artifact

print(find_artifact(sys.argv[1], {}).name)
assert "torch" not in sys.modules
ctypes.CDLL = real
import torch, ingot.ir.machine.find_gpu

loaded = ingot.ir.machine.find_gpu._torch_build()
del sys.modules["torch"]
if not sys.argv[2]:
    assert ingot.ir.machine.find_gpu._torch_build() == loaded == (torch.__version__, torch.version.cuda)
"""


@pytest.mark.parametrize(("without", "chosen"), [("", "sm_90"), ("without CUDA", "cpu")])
def test_choosing_a_variant_on_a_machine_with_a_gpu_imports_no_torch(
    made: CompileReport, without: str, chosen: str
) -> None:
    """With a driver of our own: a server process opens the artifact without torch, an engine's context starts early."""
    command = [sys.executable, "-c", CHOOSE, str(made.output), without]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [chosen]), done.stderr


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100"])
def test_the_variant_of_this_machine_is_opened(made: CompileReport, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert open_artifact(made.output).manifest.target["name"] == "cpu"
    plug(monkeypatch, TYPICAL[name])
    assert open_artifact(made.output).manifest.target["name"] == name
    # There is no fallback to the CPU: a machine with another GPU is told which variants there are.
    plug(monkeypatch, TYPICAL["sm_89"])
    for use in (open_artifact, load_artifact, LLM):
        with pytest.raises(
            TargetError, match=r"no variant of the artifact fits this machine, sm_89 \(NVIDIA L40S\)"
        ) as caught:
            use(made.output)
        assert all(one in str(caught.value.expected) for one in TARGETS)
        assert ",sm_89` adds one" in str(caught.value.hint) and "compile-model" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("target", "error", "what"),
    [
        ("cpu,sm_12", TargetError, "unknown target 'sm_12'"),
        ("cpu,", TargetError, "unknown target ''"),
        ("sm_90,cpu,sm_90", OptionError, "'sm_90' twice"),
        ("cpu,auto", OptionError, "'cpu' and 'auto', which are one target"),
    ],
)
def test_bad_lists_of_targets(
    checkpoint: Callable[[str], Path], tmp_path: Path, target: str, error: type[IngotError], what: str
) -> None:
    with pytest.raises(error, match=what):
        compile_model(checkpoint(NAME), tmp_path / "a.ingot", target=target)
    assert list(tmp_path.iterdir()) == []


def test_options_that_fit_no_several_targets(checkpoint: Callable[[str], Path]) -> None:
    for options, error, what in (
        ({"mesh": {"tp": 2}}, OptionError, "several targets with a mesh"),
        ({"tune": True}, IngotError, "tun"),
        ({"tuning_log": {"version": 2, "target": "sm_86", "cores": 1, "choices": []}}, TargetError, "for sm_86"),
    ):
        with pytest.raises(error, match=what):
            read_requests(checkpoint(NAME), target="cpu,sm_90", **options)
    log = {"version": 2, "target": "sm_90", "cores": 132, "choices": []}
    requests = read_requests(checkpoint(NAME), target="cpu,sm_90", tuning_log=log)
    assert [one.tuning_log is not None for one in requests] == [False, True]
    assert requests[1].checkpoint is requests[0].checkpoint


def damage_variants(folder: Path) -> None:
    (folder / "variants.json").write_text((folder / "variants.json").read_text().replace("Llama", "Lhama"))


def damage_manifest(folder: Path) -> None:
    shutil.copyfile(folder / "variants" / "sm_90" / "manifest.json", folder / "variants" / "cpu" / "manifest.json")
    shutil.copyfile(folder / "variants" / "sm_90" / "manifest.sha256", folder / "variants" / "cpu" / "manifest.sha256")
    (folder / "variants" / "cpu" / GOLDEN).unlink()
    shutil.copyfile(folder / "variants" / "sm_90" / "timings.json", folder / "variants" / "cpu" / "timings.json")


def link_weights(folder: Path) -> None:
    (folder / "weights").rename(folder.parent / "weights")
    (folder / "weights").symlink_to(folder.parent / "weights")


def other_schema(folder: Path) -> None:
    text = (folder / "variants.json").read_text()
    (folder / "variants.json").write_text(text.replace(str(SCHEMA_VERSION), str(SCHEMA_VERSION + 1)))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (damage_variants, "does not match its checksum"),
        (damage_manifest, "is not the one that variants.json names"),
        (link_weights, "link or special file"),
        (other_schema, f"schema version {SCHEMA_VERSION + 1}"),
    ],
)
def test_damage_is_named(copy: Path, change: Callable[[Path], None], what: str) -> None:
    change(copy)
    with pytest.raises(ArtifactError, match=what):
        open_artifact(copy)


def test_shared_files_are_checked(copy: Path) -> None:
    files = open_artifact(copy, variant="sm_100").manifest.files
    place = next(copy / one.shared for one in files if one.shared is not None and one.path == "program.ir")
    data = place.read_bytes()
    place.write_bytes(bytes(len(data)))
    with pytest.raises(ArtifactError, match="damaged in 1 chunks"):
        open_artifact(copy, variant="sm_100")
    place.unlink()
    with pytest.raises(ArtifactError, match=r"variants/sm_80/program\.ir: missing"):
        open_artifact(copy, variant="sm_100")
    open_artifact(copy, variant="cpu")


def test_commands_take_a_variant(made: CompileReport, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(made.output)
    assert run(INGOT, ["inspect", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"]["name"], found["tried"]) == ("cpu", True)
    assert {name: one["tried"] for name, one in found["variants"].items()} == {
        "cpu": True,
        "sm_80": False,
        "sm_90": True,
        "sm_100": False,
    }
    assert run(INGOT, ["inspect", path, "--variant", "sm_100"]) == 0
    assert "untried on hardware" in capsys.readouterr().out
    assert run(INGOT, ["explain", path, "--variant", "sm_90", "--json"]) == 0
    capsys.readouterr()
    assert run(INGOT, ["verify", path]) == 0
    capsys.readouterr()
    assert run(INGOT, ["inspect", path, "--variant", "sm_86"]) == 2
    assert "no variant 'sm_86'" in capsys.readouterr().err
    assert run(INGOT, ["inspect", f"{path}/variants/cpu", "--variant", "sm_90"]) == 2
    assert "no variant 'sm_90'" in capsys.readouterr().err
    assert run(INGOT, ["bisect", path, "--variant", "sm_90"]) == 2
    assert "compiled for a GPU, sm_90" in capsys.readouterr().err
    assert run(INGOT, ["target", "--target", "sm_100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tried"] is False


def test_report_and_benchmarks_take_a_variant(
    made: CompileReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = str(made.output), tmp_path / "page.html"
    assert run(INGOT, ["report", path, "-o", str(page), "--variant", "sm_100"]) == 0
    assert made.variants["sm_100"].build_id in page.read_text()
    assert run(INGOT, ["report", path, "-o", str(page)]) == 0
    assert made.variants["cpu"].build_id in page.read_text()
    capsys.readouterr()
    lengths = ["--input-len", "4", "--output-len", "2"]
    for command in (
        ["latency", *lengths, "--num-iters", "1", "--num-iters-warmup", "0"],
        ["throughput", *lengths, "--num-prompts", "1"],
        ["serve-sim", *lengths, "--num-prompts", "1"],
        ["startup", "--input-len", "4"],
    ):
        assert run(INGOT, ["bench", command[0], path, *command[1:], "--variant", "sm_86"]) == 2
        assert "no variant 'sm_86'" in capsys.readouterr().err
    assert (
        run(INGOT, ["bench", "throughput", path, *lengths, "--num-prompts", "1", "--variant", "cpu", "--json", "-"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["num_requests"] == 1
    assert run(INGOT, ["bench", "latency", path, *lengths, "--batch-size", "1", "--variant", "sm_90"]) == 2
    assert "compiled for a GPU, sm_90" in capsys.readouterr().err


def test_diff_takes_the_variant_of_each_side(
    made: CompileReport, plain: CompileReport, capsys: pytest.CaptureFixture[str]
) -> None:
    fat, one = str(made.output), str(plain.output)

    def diff(*arguments: str) -> str:
        assert run(INGOT, ["diff", *arguments]) == 0
        return capsys.readouterr().out

    assert (
        diff(fat, one)
        == diff(fat, one, "--variant", "cpu")
        == diff(fat, fat, "--variant", "sm_90")
        == "no differences\n"
    )
    between = diff(fat, fat, "--variant", "cpu,sm_90")
    assert "~ target device cpu -> cuda\n" in between
    assert between == diff(f"{fat}/variants/cpu", f"{fat}/variants/sm_90")
    assert diff(f"{fat}:cse@FUSED", f"{fat}:FUSED", "--variant", "sm_80,sm_100")
    assert run(INGOT, ["diff", fat, one, "--variant", "sm_90"]) == 2
    assert "no variant 'sm_90'" in capsys.readouterr().err
    assert run(INGOT, ["diff", fat, fat, "--variant", "cpu,sm_80,sm_90"]) == 2
    assert "one variant, or two with a comma" in capsys.readouterr().err


def test_why_miss_compares_the_variant(
    made: CompileReport, checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--backend", "reference", "--max-batch", "4", "--max-tokens", "64", "--max-seq-len", "64"]
    asked = ["why-miss", str(made.output), str(checkpoint(NAME)), "--target", "sm_90,cpu", *options]
    assert run(INGOT, [*asked, "--variant", "sm_90"]) == 0
    assert f"same request_key {made.variants['sm_90'].request_key}" in capsys.readouterr().out
    assert run(INGOT, [*asked, "--variant", "sm_80"]) == 2
    assert "the targets have no sm_80" in capsys.readouterr().err


def test_the_cache_has_fat_artifacts_by_the_keys_of_their_targets(
    made: CompileReport, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: one.request_key for name, one in made.variants.items()}
    assert made.request_key == fat_key(dict(reversed(keys.items()))) and made.request_key not in keys.values()
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    options = {**{name: value for name, value in OPTIONS.items() if name != "jobs"}, "target": "cpu,sm_90"}
    path = compile_cached(checkpoint(NAME), **options)
    assert path.stem == fat_key({name: keys[name] for name in ("sm_90", "cpu")})
    assert compile_cached(checkpoint(NAME), variant="sm_90", **options) == path / "variants" / "sm_90"
    with pytest.raises(OptionError, match="variant 'sm_80' is not compiled"):
        compile_cached(checkpoint(NAME), variant="sm_80", **options)


def test_a_failed_compile_leaves_nothing(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ingot.compile.driver

    def fail(*_: object) -> object:
        raise OptionError("stopped")

    monkeypatch.setattr(ingot.compile.driver, "write_timings", fail)
    with pytest.raises(OptionError, match="stopped"):
        compile_model(checkpoint(NAME), tmp_path / "a.ingot", target="cpu,sm_90", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_like_the_typical_one_is_the_same_variant(made: CompileReport, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, replace(TYPICAL["sm_90"], cores=114, product="NVIDIA H100 PCIe"))
    assert open_artifact(made.output).manifest.target["name"] == "sm_90"
