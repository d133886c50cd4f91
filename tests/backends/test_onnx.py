"""The onnx backend: each op on its samples, any size, what it refuses, memory, and a model served without onnx."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drawn import drawn_in_one_of
from every_op import L_MAX, T_MAX, every_op
from onnx_cases import REFUSED, WITHOUT, Built, Run, build_every_op
from staged import BUCKET
from tiny import TINY

from ingot import compile_model
from ingot.backends.onnx.emit import Onnx
from ingot.backends.onnx.load import _options, load
from ingot.backends.onnx.model import ELEMENTS, MODEL, RESULTS
from ingot.backends.onnx.translate import TRANSLATIONS
from ingot.compile.competing import competitors
from ingot.ir import ops
from ingot.ir.artifact.plan import Executable
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError, TargetError
from ingot.ir.machine.target import Target
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.runtime.loading.load_context import on_one_device

TARGET = Target.detect("cpu")
pytestmark = pytest.mark.xdist_group("onnx")


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package)


def emitted(body: Program, folder: Path) -> tuple[Executable, Run]:
    executable = Onnx().emit(body, "key", TARGET, folder)
    return executable, load(executable, folder, on_one_device("cpu"))


@pytest.fixture(
    scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_every_op(request.param, tmp_path_factory.mktemp("onnx"), emitted)


def test_every_op_on_its_samples(built: Built) -> None:
    built.check_samples()


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (3, 2), (7, L_MAX), (64, 1), (T_MAX, L_MAX)])
def test_any_size(built: Built, tokens: int, rows: int) -> None:
    """One model for any T and L."""
    built.check_size(tokens, rows)


def test_every_translation_is_of_an_op() -> None:
    for name in TRANSLATIONS:
        if name.startswith("ingot."):
            assert OPS[name.removeprefix("ingot.")].fusible, name
    assert {name.removeprefix("ingot.") for name in TRANSLATIONS} >= {
        name for name, op in OPS.items() if op.fusible and name not in WITHOUT
    }


def test_the_model_is_of_the_opset_and_checked(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    model = onnx.load(str(built.folder / MODEL))
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 23)]
    assert {dim.dim_param for one in model.graph.input for dim in one.type.tensor_type.shape.dim} >= {"T", "L"}
    assert [one.name for one in model.graph.input] == list(built.every.body.input_types())
    again = Onnx().emit(built.every.body, "key", TARGET, built.folder / "..")
    assert (built.folder / ".." / again.files[0]).read_bytes() == (built.folder / MODEL).read_bytes()
    monkeypatch.setattr("ingot.backends.onnx.build.OPSET", 6)  # Gelu and others are younger
    with pytest.raises(BackendError, match="the ONNX model of region 'every_op' is invalid"):
        Onnx().emit(built.every.body, "key", TARGET, built.folder)


ROUNDS = """\
program rounds stage=FUSED
dim T in [1, 8]
input x: bf16[T, 8]
input y: bf16[T, 8]
%sum = aten.add.Tensor(%x, %y) : bf16[T, 8]
%back = aten.mul.Tensor(%sum, 3.0) : bf16[T, 8]
return out=%back
"""


def test_values_are_rounded_between_calls(tmp_path: Path) -> None:
    """Bit for bit: each op rounds, although a region computes in float32."""
    _, run = emitted(parse_program(ROUNDS), tmp_path)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 8, generator=generator).bfloat16() for _ in range(2))
    assert torch.equal(run(x, y)[0], (x + y) * 3.0)
    assert not torch.equal(run(x, y)[0], ((x.float() + y.float()) * 3.0).bfloat16())


VIEWS = """\
program views stage=FUSED
dim T in [1, 8]
input x: f32[T, 4]
input weight: f32[12, 4]
%all = ingot.linear(%x, %weight) : f32[T, 12]
%q = aten.slice.Tensor(%all, 1, 0, 8) : f32[T, 8; 12, 1]
%k = aten.slice.Tensor(%all, 1, 8, 12) : f32[T, 4; 12, 1]
%heads = aten.view.default(%q, [-1, 2, 4]) : f32[T, 2, 4; 12, 4, 1]
%turned = aten.permute.default(%x, [1, 0]) : f32[4, T; 1, 4]
return heads=%heads, k=%k
"""


def test_views_share_the_memory_of_one_output(tmp_path: Path) -> None:
    import onnx

    executable, run = emitted(parse_program(VIEWS), tmp_path)
    model = onnx.load(str(tmp_path / MODEL))
    assert len(model.graph.output) == 1 and [
        node.op_type for node in model.graph.node if node.output[0] in {one.name for one in model.graph.output}
    ] == ["Gemm"]
    (described,) = [json.loads(one.value) for one in model.metadata_props if one.key == RESULTS]
    assert [one["offset"] for one in described] == [0, 8]
    x, weight = torch.randn(3, 4), torch.randn(12, 4)
    heads, k = run(x, weight)
    whole = x @ weight.T
    assert torch.allclose(heads, whole[:, :8].view(3, 2, 4), atol=1e-6) and torch.allclose(k, whole[:, 8:], atol=1e-6)
    assert heads.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    sizes = {"T": 8}
    assert Onnx().workspace(parse_program(VIEWS), executable, tmp_path, sizes, 1) == 8 * 12 * 4


def test_inputs_and_outputs_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime gets the addresses of the inputs, and the results are what it wrote to."""
    import onnxruntime

    bound: dict[str, int] = {}
    plain = {way: getattr(onnxruntime.IOBinding, f"bind_{way}") for way in ("input", "output")}

    def recording(way: str) -> Callable[..., object]:
        def bind(self: object, name: str, *args: object) -> object:
            address = args[-1]
            assert isinstance(address, int)
            bound[f"{way} {name}"] = address
            return plain[way](self, name, *args)

        return bind

    for way in plain:
        monkeypatch.setattr(onnxruntime.IOBinding, f"bind_{way}", recording(way))
    _, run = emitted(parse_program(ROUNDS), tmp_path)
    x, y = torch.ones(2, 8).bfloat16(), torch.ones(2, 8).bfloat16()
    (out,) = run(x, y)
    assert set(bound.values()) == {x.data_ptr(), y.data_ptr(), out.data_ptr()}


def test_threads_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    seen = []
    session = onnxruntime.InferenceSession

    def opened(path: str, options: object, **given: object) -> object:
        seen.append(options)
        return session(path, options, **given)

    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        emitted(parse_program(ROUNDS), tmp_path)
    finally:
        torch.set_num_threads(before)
    assert [one.intra_op_num_threads for one in seen] == [3]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_translation_is_refused_by_name(kind: str) -> None:
    assert Onnx().claim([REFUSED[kind].node()], TARGET, BUCKET) == No(REFUSED[kind].reason)


def test_quantized_weights_are_refused_by_name() -> None:
    every = every_op([torch.float32])
    (node, *_) = [one for one in every.body.calls() if one.target is ops.quant_linear.overload]
    assert Onnx().claim([node], TARGET, BUCKET) == No("no translation of ingot.quant_linear to ONNX")
    others = [one for one in every.body.calls() if one.target is not ops.quant_linear.overload]
    assert isinstance(Onnx().claim(others, TARGET, BUCKET), Yes)


def test_it_competes_only_if_asked() -> None:
    assert "onnx" not in [one.name for one in competitors("auto", TARGET).backends]
    assert [one.name for one in competitors("onnx", TARGET).backends] == ["onnx", "reference", "rowwise"]
    assert "onnx" in [one.name for one in competitors("auto,onnx", TARGET).backends]


def test_a_damaged_model(tmp_path: Path) -> None:
    executable = Onnx().emit(parse_program(ROUNDS), "key", TARGET, tmp_path)
    (tmp_path / MODEL).write_bytes(b"damaged")
    with pytest.raises(BackendError, match="the ONNX model does not load"):
        load(executable, tmp_path, on_one_device("cpu"))


def test_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = Onnx().emit(parse_program(ROUNDS), "key", TARGET, tmp_path)
    monkeypatch.setattr("ingot.ir.machine.extras.is_installed", lambda module: False)
    for act in (lambda: load(executable, tmp_path, on_one_device("cpu")), Onnx().toolchain):
        with pytest.raises(TargetError, match="which is not installed") as caught:
            act()
        assert caught.value.hint == "pip install 'ingot[onnx]'"


def test_the_plan_counts_what_a_call_allocates(tmp_path: Path) -> None:
    """By hand: x and y in float32, their sum, and the result, 8 x 8 each."""
    body = parse_program(ROUNDS)
    executable, _ = emitted(body, tmp_path)
    assert Onnx().workspace(body, executable, tmp_path, {"T": 8}, 1) == 3 * 64 * 4 + 64 * 2


def test_nodes_run_in_the_order_that_the_plan_counts(built: Built, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    options = _options(onnxruntime)
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(str(built.folder / MODEL), options, providers=["CPUExecutionProvider"])
    binding, inputs = session.io_binding(), built.every.inputs(tokens=3, rows=2)
    for name, tensor in inputs.items():
        dense = inputs[name] = tensor.contiguous()
        binding.bind_input(name, "cpu", 0, ELEMENTS[tensor.dtype], tuple(tensor.shape), dense.data_ptr())
    for one in session.get_outputs():
        binding.bind_output(one.name)
    session.run_with_iobinding(binding)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [one["name"].removesuffix("_kernel_time") for one in events if one["name"].endswith("_kernel_time")]
    assert ran == [node.name for node in onnx.load(str(built.folder / MODEL)).graph.node]


SERVE = """
import sys
import torch
bare = {name for name in sys.modules if name.startswith("torch.onnx")}
from ingot import LLM, SamplingParams

def tokens(artifact):
    params = SamplingParams(temperature=0.0, max_tokens=6)
    return [one.outputs[0].token_ids for one in LLM(artifact).generate([[1, 2, 3], [4, 5]], params)]

found = tokens(sys.argv[1])
assert "onnxruntime" in sys.modules, "the regions run in it"
imported = {name for name in sys.modules if name.partition(".")[0] in ("onnx", "onnxscript")}
imported |= {name for name in sys.modules if name.startswith("torch.onnx")} - bare
imported |= {name for name in sys.modules if name.startswith("ingot.backends.onnx.")}
own = {f"ingot.backends.onnx.{name}" for name in ("load", "model", "results")}
assert imported == own, imported
print(found == tokens(sys.argv[2]))
"""


@pytest.mark.parametrize("dtype", drawn_in_one_of(3, ["float32", "bfloat16"]))
def test_a_model_is_served_without_onnx(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    source = TINY["llama-plain"].write(tmp_path / "checkpoint")
    options = dict(max_seq_len=40, max_batch=2, max_tokens=16, jobs=1, dtype=dtype, trace="none")
    artifacts = [tmp_path / f"{backend}.ingot" for backend in ("onnx", "reference")]
    for artifact in artifacts:
        report = compile_model(source, artifact, backend=artifact.stem, **options)  # type: ignore[arg-type]
        assert report.nodes_per_backend.keys() == {artifact.stem, "reference"}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *map(str, artifacts)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if dtype == "float32":  # in bfloat16, equally good sums may choose another token
        assert done.stdout == "True\n"
    manifest = json.loads((tmp_path / "onnx.ingot" / "manifest.json").read_text())
    assert manifest["versions"].keys() == {"torch", "onnxruntime"}
