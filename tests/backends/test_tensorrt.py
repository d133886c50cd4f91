"""The tensorrt backend against a double of the module `tensorrt`: each op on its samples, types, shapes of each bucket
class, memory, captures, and what it refuses. The double's signatures are those of the published bindings."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fake_tensorrt
import pytest
import torch
from every_op import L_MAX, T_MAX, EveryOp, every_op
from staged import BUCKET, traced
from tiny import CHECKPOINTS

import ingot.backends.tensorrt.emit as emit_side
import ingot.backends.tensorrt.library as library_side
import ingot.backends.tensorrt.load as load_side
from ingot.backends.tensorrt.emit import Tensorrt
from ingot.backends.tensorrt.load import load
from ingot.backends.tensorrt.profile import Shapes, profile_of
from ingot.backends.tensorrt.record import ENGINE, NATIVE, RECORD, Record
from ingot.compile.buckets import bucket_classes
from ingot.compile.competing import competing, competitors, on_request
from ingot.compile.identity import exe_document
from ingot.frontend.trace import Limits
from ingot.ir import ops
from ingot.ir.artifact.plan import BucketClass, Executable
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import No, Yes
from ingot.ir.errors import BackendError, TargetError
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Region, Stage
from ingot.passes.base import PassContext
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import PIPELINE
from ingot.runtime.loading.load_context import on_one_device

TARGET = Target.named("sm_90")
GPU = "NVIDIA H200"
STREAM = 7
# Fusible ops without a translation: formats of weights are too many for a table of nodes.
WITHOUT = {"quant_linear"}

pytestmark = pytest.mark.xdist_group("tensorrt")


@dataclass
class World:
    """A machine with the double of TensorRT and a GPU, whose memory is the host's."""

    capturing: bool = False

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        return fake_tensorrt.CALLS

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [one for one in self.calls if one[0] in names]


@pytest.fixture(scope="module")
def machine() -> Iterator[World]:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", fake_tensorrt.module())
        for side in (emit_side, load_side):
            patch.setattr(side, "product_here", lambda: GPU)
        patch.setattr(load_side, "current_stream", lambda device: STREAM)
        patch.setattr(load_side, "new_tensor", lambda shape, strides, dtype: fake_tensorrt.aligned(shape, dtype))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: world.capturing)
        yield world


@pytest.fixture
def world(machine: World) -> World:
    machine.capturing = False
    machine.calls.clear()
    return machine


def backend() -> Tensorrt:
    return Tensorrt(missing=lambda target: "")


Run = Callable[..., Sequence[torch.Tensor]]


def emitted(body: Program, folder: Path) -> tuple[Executable, Run]:
    executable = backend().emit(body, "key", TARGET, folder)
    return executable, load(executable, folder, on_one_device("cpu"))


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at an address that TensorRT takes; gaps stay."""
    if not tensor.is_contiguous():
        return tensor
    made: torch.Tensor = fake_tensorrt.aligned(tensor.shape, tensor.dtype)
    return made.copy_(tensor)


@dataclass(frozen=True)
class Built:
    every: EveryOp
    run: Run
    folder: Path

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = self.run(*(inputs[name] for name in self.every.body.input_types()))
        return dict(zip(self.every.outputs, found, strict=True))


@pytest.fixture(
    scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def built(machine: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    every = every_op([request.param], without=WITHOUT)
    folder = tmp_path_factory.mktemp("tensorrt")
    return Built(every, emitted(every.body, folder)[1], folder)


# Numbers, types and shapes.


def test_every_op_on_its_samples(built: Built, world: World) -> None:
    results = built(built.every.inputs(tokens=5, rows=2))
    fusible = {name for name, op in OPS.items() if op.fusible}
    assert {op.name for op, *_ in built.every.samples} == fusible - WITHOUT
    for op, dtype, sample, names in built.every.samples:
        expected = op.reference(*sample.args, **sample.kwargs)
        for name, right in zip(names, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert (problem := compare(results[name], right, right.dtype)) is None, f"{op.name} in {dtype}: {problem}"


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, L_MAX), (T_MAX, L_MAX)])
def test_any_size(built: Built, world: World, tokens: int, rows: int) -> None:
    """One engine for any T and L: as near to float64 as the interpreter is, with the promised types and strides."""
    inputs = built.every.inputs(tokens, rows, seed=tokens)
    found = built(inputs)
    plain, exact = (interpret(built.every.body, inputs, exact=exact) for exact in (False, True))
    for name, node in built.every.body.output_nodes().items():
        assert node.meta["type"].mismatch(found[name], {"T": tokens, "L": rows}) is None
        right = exact[name]
        problem = breach(
            Numerics.ROUNDING, Measured(plain[name], right), Measured(found[name], right), plain[name].dtype
        )
        assert problem is None, f"{name} at {tokens}: {problem}"


def types_of(folder: Path) -> tuple[list[Any], dict[str, int]]:
    """The nodes of an engine's network, and the element type of each value."""
    import onnx

    serialized = (folder / ENGINE).read_bytes().split(b"\n", 2)[2]
    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(serialized), strict_mode=True)
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    types = {one.name: one.type.tensor_type.elem_type for one in values}
    types |= {one.name: one.data_type for one in model.graph.initializer}
    return list(model.graph.node), types


@pytest.mark.parametrize(("dtype", "factors", "moved"), [("f32", 1, 1), ("bf16", 16, 16), ("f16", 1, 10)])
def test_dtypes_of_the_network(
    dtype: str, factors: int, moved: int, world: World, tmp_path: Path
) -> None:  # numbers of onnx.proto: 1 is float32, 10 float16, 16 bfloat16
    """A product of bfloat16 stays bfloat16. One of float16 has its factors cast, so that sums are float32; so has one
    with a bias, which rounds once. Ops that move numbers keep the dtype; norms compute in float32."""
    emitted(parse_program(LAYER.replace("bf16", dtype)), tmp_path)
    nodes, types = types_of(tmp_path)
    kinds = {kind: [node for node in nodes if node.op_type == kind] for kind in ("Gemm", "Reshape", "ReduceMean")}
    assert all(kinds.values())
    biased, plain = sorted(kinds["Gemm"], key=lambda node: len(node.input), reverse=True)
    assert {types[name] for name in (*plain.input, *plain.output)} == {factors}
    assert {types[name] for name in (*biased.input, *biased.output)} == {1}
    assert {types[node.output[0]] for node in kinds["Reshape"]} == {moved}
    assert {types[node.output[0]] for node in kinds["ReduceMean"]} == {1}


LAYER = """\
program layer stage=FUSED
dim T in [2, 16]
input x: bf16[T, 16]
input residual: bf16[T, 16]
input norm: bf16[16]
input weight: bf16[24, 16]
input bias: bf16[24]
input plain: bf16[8, 16]
input positions: i32[T]
input table: f32[32, 8]
%both = ingot.add_rms_norm(%x, %residual, %norm, eps=1e-05) : (bf16[T, 16], bf16[T, 16])
%normed = getitem(%both, 0) : bf16[T, 16]
%all = ingot.linear(%normed, %weight, %bias) : bf16[T, 24]
%q = aten.slice.Tensor(%all, 1, 0, 16) : bf16[T, 16; 24, 1]
%v = aten.slice.Tensor(%all, 1, 16, 24) : bf16[T, 8; 24, 1]
%heads = aten.view.default(%q, [-1, 2, 8]) : bf16[T, 2, 8; 24, 8, 1]
%turned = ingot.rope(%heads, %positions, %table) : bf16[T, 2, 8]
%gate = ingot.linear(%normed, %plain) : bf16[T, 8]
return q=%turned, v=%v, gate=%gate
"""


def layer_inputs(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for name, value_type in parse_program(LAYER).input_types().items():
        shape = value_type.bind({"T": tokens})
        if name == "positions":
            inputs.append(torch.randint(0, 32, shape, generator=generator, dtype=torch.int32))
        else:
            inputs.append(torch.randn(shape, generator=generator).to(value_type.dtype))
    return [on_device(one) for one in inputs]


def test_what_the_builder_is_told(world: World, tmp_path: Path) -> None:
    emitted(parse_program(LAYER), tmp_path)
    assert world.named("create_network") == [("create_network", 1)], "bit 0: strongly typed"
    assert world.named("build") == [("build", set(), 0)], "no TF32, and no other streams"
    ranges = {one[1]: one[2:] for one in world.named("set_shape")}
    assert ranges == {
        "x": ((2, 16), (16, 16), (16, 16)),
        "residual": ((2, 16), (16, 16), (16, 16)),
        "positions": ((2,), (16,), (16,)),
    }


def test_a_size_without_bounds_is_refused(world: World) -> None:
    body = parse_program(LAYER)
    body.dims = {}
    with pytest.raises(BackendError, match="the size T of the input x has no bounds"):
        profile_of(body)


LIMITS = Limits(max_seq_len=1024, max_batch=600, max_tokens=1024)


def lowered(architecture: str, buckets: tuple[BucketClass, ...], dtype: str = "bfloat16") -> dict[str, Program]:
    """The programs of a model for an H200 with its regions, by bucket class. Nothing is compiled."""
    config = {**CHECKPOINTS[architecture].config, "dtype": dtype, "torch_dtype": dtype}
    context = PassContext(
        TARGET,
        LIMITS.max_seq_len,
        LIMITS.max_batch,
        LIMITS.max_tokens,
        backends=(backend(), *competing("reference", TARGET)),
    )
    phases = [phase for phase in PIPELINE if phase.stage <= Stage.LOWERED]
    kept = tuple(one for one in phases[-1].passes if one.name in ("choose-backends", "form-regions"))
    phases = [*phases[:-1], replace(phases[-1], passes=kept)]
    return run_pipeline(traced(config, LIMITS), context, buckets, tuple(phases), upto=Stage.LOWERED).programs


@pytest.mark.parametrize(("architecture", "dtype"), [("llama-plain", "bfloat16"), ("qwen2-cut", "float16")])
def test_engines_have_the_shapes_of_their_bucket_class(
    architecture: str, dtype: str, world: World, tmp_path: Path
) -> None:
    """Each region of each class: its range of shapes is the class's, it computes both ends, and refuses one more."""
    classes = bucket_classes(TARGET, (backend(),), LIMITS.max_tokens, LIMITS.max_batch, deterministic=False)
    assert [one.name for one in classes] == ["decode-1", "decode-16", "decode-32", "decode-64", "decode-512", "extend"]
    programs = lowered(architecture, classes, dtype)
    for bucket in classes:
        regions = [one for one in programs[bucket.name].regions.values() if one.backend == "tensorrt"]
        assert regions, bucket.name
        for region in regions:
            _check_region(region, bucket, tmp_path / f"{bucket.name}-{region.name}")


def _check_region(region: Region, bucket: BucketClass, folder: Path) -> None:
    folder.mkdir()
    body, (fewest, most) = region.body, bucket.tokens
    expected = {"T": (fewest, most), "B": (1, min(most, LIMITS.max_batch)), "L": (1, min(most, 1024))}
    for name, shapes in profile_of(body).items():
        sizes = body.input_types()[name].shape
        low, high = (tuple(expected[s][end] if isinstance(s, str) else s for s in sizes) for end in (0, 1))
        assert shapes == Shapes(low, high, high), f"{name} of {region.name} in {bucket.name}"
    _, run = emitted(body, folder)
    symbols = sorted(body.symbols())
    for end in (0, 1):
        inputs = _inputs(body, {one: expected[one][end] for one in symbols})
        found = dict(zip(body.output_nodes(), run(*inputs.values()), strict=True))
        plain, exact = (interpret(body, inputs, exact=exact) for exact in (False, True))
        for name, right in exact.items():
            errors = Measured(plain[name], right), Measured(found[name], right)
            problem = breach(Numerics.ROUNDING, *errors, plain[name].dtype)
            assert problem is None, f"{name} of {region.name} in {bucket.name}: {problem}"
    if symbols:
        too_many = _inputs(body, {one: expected[one][1] + 1 for one in symbols})
        with pytest.raises(BackendError, match="the TensorRT engine takes no input"):
            run(*too_many.values())


def _inputs(body: Program, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    generator, made = torch.Generator().manual_seed(1), {}
    for name, value_type in body.input_types().items():
        shape = value_type.bind(sizes)
        if value_type.dtype.is_floating_point:
            scale = shape[-1] ** -0.5 if "T" not in value_type.shape else 1.0
            made[name] = on_device((torch.randn(shape, generator=generator) * scale).to(value_type.dtype))
        else:
            made[name] = on_device(torch.randint(0, 16, shape, generator=generator, dtype=value_type.dtype))
        if value_type.strides is not None:
            whole = torch.zeros(shape[0], value_type.strides[0], dtype=value_type.dtype)
            made[name] = whole.as_strided(shape, value_type.strides).copy_(made[name])
    return made


# Memory, addresses and captures.


def test_tensors_are_not_copied_and_memory_is_the_callers(world: World, tmp_path: Path) -> None:
    executable, run = emitted(parse_program(LAYER), tmp_path)
    inputs = layer_inputs(3)
    world.calls.clear()
    q, v, _ = run(*inputs)
    assert world.named("create_execution_context") == [("create_execution_context", 2)], "USER_MANAGED"
    addresses = {one[2]: one[3] for one in world.named("set_tensor_address")}
    names = list(parse_program(LAYER).input_types())
    assert {name: addresses.pop(name) for name in names} == {
        name: tensor.data_ptr() for name, tensor in zip(names, inputs, strict=True)
    }
    whole = v.untyped_storage().data_ptr()
    assert q.data_ptr() in addresses.values() and len(addresses) == 3, "v is a view of the product"
    assert any(whole <= address <= v.data_ptr() for address in addresses.values())
    ((_, _, address, size),) = world.named("set_device_memory")
    assert size == fake_tensorrt.MEMORY and address and address % 256 == 0
    assert [one[2] for one in world.named("execute_async_v3")] == [STREAM]
    record = Record.model_validate_json((tmp_path / RECORD).read_text())
    assert record.memory == size and executable.files == (ENGINE, RECORD)


def test_a_tensor_with_gaps_or_at_an_odd_address_is_copied(world: World, tmp_path: Path) -> None:
    _, run = emitted(parse_program(LAYER), tmp_path)
    inputs = layer_inputs(3)
    expected = run(*inputs)
    memory = fake_tensorrt.aligned((3 * 16 + 8,), torch.bfloat16)
    odd = memory[8:].view(3, 16).copy_(inputs[0])
    assert odd.data_ptr() % 256 and odd.is_contiguous()
    gaps = torch.empty(3, 32, dtype=torch.bfloat16)[:, :16].copy_(inputs[1])
    world.calls.clear()
    found = run(odd, gaps, *inputs[2:])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    addresses = {one[2]: one[3] for one in world.named("set_tensor_address")}
    assert addresses["x"] != odd.data_ptr() and addresses["residual"] != gaps.data_ptr()


def test_the_plan_counts_what_a_call_allocates(world: World, tmp_path: Path) -> None:
    """By hand: the engine's memory, three outputs, the copy of the positions; x has gaps in the second case only."""
    for text, copies in ((LAYER, 16 * 4), (LAYER.replace("x: bf16[T, 16]", "x: bf16[T, 16; 32, 1]"), 16 * 4 + 512)):
        body = parse_program(text)
        executable = backend().emit(body, "key", TARGET, tmp_path)
        found = backend().workspace(body, executable, tmp_path, {"T": 16}, 1)
        assert found == fake_tensorrt.MEMORY + 16 * (24 + 16 + 8) * 2 + copies


def test_a_captured_context_keeps_its_shapes(world: World, tmp_path: Path) -> None:
    """Each size runs once, and then two graphs are captured, as the runtime does it."""
    _, run = emitted(parse_program(LAYER), tmp_path)

    def ran(tokens: int, *, capturing: bool) -> tuple[int, list[tuple[Any, ...]]]:
        """The context that ran, and the shapes that it was given for that."""
        world.capturing = capturing
        world.calls.clear()
        run(*layer_inputs(tokens))
        ((_, context, _),) = world.named("execute_async_v3")
        return context, world.named("set_input_shape", "create_execution_context")

    contexts = {}
    for tokens in (4, 8):
        contexts[tokens], told = ran(tokens, capturing=False)
        assert [one[0] for one in told].count("create_execution_context") == 1
        for _ in range(2):
            assert ran(tokens, capturing=True) == (contexts[tokens], []), "nothing of the context changes"
    assert contexts[4] != contexts[8]
    free, told = ran(4, capturing=False)
    assert free not in contexts.values() and told
    assert ran(5, capturing=False)[0] == free, "steps that are not captured share a context"
    assert ran(5, capturing=False) == (free, []), "the same sizes again"
    assert ran(8, capturing=True) == (contexts[8], [])
    world.capturing = True
    with pytest.raises(BackendError, match=r"captured of a TensorRT engine with sizes \(6,\) that have not run"):
        run(*layer_inputs(6))


def test_a_context_that_refused_sizes_is_told_all_shapes_again(world: World, tmp_path: Path) -> None:
    _, run = emitted(parse_program(LAYER), tmp_path)
    expected = run(*layer_inputs(4))
    with pytest.raises(BackendError, match=r"takes no input x of shape \[17, 16\]"):
        run(*layer_inputs(17))
    world.calls.clear()
    found = run(*layer_inputs(4))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {one[2] for one in world.named("set_input_shape")} == {"x", "residual", "positions"}


# What is refused.

REFUSED = {
    "an op": ("ingot.embedding(%i, %x) : f32[T, 8]", "no translation of ingot.embedding to ONNX"),
    "a dtype": (
        "ingot.cast(%x, dtype=f8e4m3) : f8e4m3[T, 8]",
        "no translation of ingot.cast with f8e4m3[T, 8] to ONNX",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_translation_is_refused_by_name(kind: str) -> None:
    call, reason = REFUSED[kind]
    text = f"program p stage=FUSED\ndim T in [1, 8]\ninput x: f32[T, 8]\ninput i: i32[T]\n%y = {call}\nreturn y=%y\n"
    (node,) = parse_program(text).calls()
    assert backend().claim([node], TARGET, BUCKET) == No(reason)


def test_claims() -> None:
    every = every_op([torch.bfloat16])
    nodes = [one for one in every.body.calls() if one.target is not ops.quant_linear.overload]
    answer = backend().claim(nodes, TARGET, BUCKET)
    assert isinstance(answer, Yes) and not answer.timed and list(answer.layouts) == ["weight"]
    assert backend().claim(nodes, Target.detect("cpu"), BUCKET) == No("not for device 'cpu'")
    assert Tensorrt(missing=lambda target: f"no {target}").claim(nodes, TARGET, BUCKET) == No("no sm_90")
    with pytest.raises(BackendError, match="builds no engine: no sm_90"):
        Tensorrt(missing=lambda target: f"no {target}").emit(every.body, "key", TARGET, Path())


@pytest.mark.parametrize("version", ["10.16.1.11", "12.0.0.1", "eleven", None])
def test_a_version_that_was_never_tried(version: str | None, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.module(version))
    with pytest.raises(TargetError, match=f"its version is {version or 'unknown'}") as caught:
        backend().toolchain()
    assert caught.value.expected == "11.0 or newer, below 12.0"
    with pytest.raises(TargetError, match="its version is"):
        load(Executable(id="e", backend="tensorrt", inputs=(), outputs=(), files=()), Path(), on_one_device("cpu"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.setattr("ingot.ir.machine.extras.is_installed", lambda module: module != "tensorrt")
    missing = "needs the package 'tensorrt-cu13', which is not installed"
    with pytest.raises(TargetError, match=missing) as caught:
        Tensorrt().toolchain()
    assert caught.value.hint == "pip install 'ingot[tensorrt]'"
    assert missing in on_request(TARGET)["tensorrt"]
    with pytest.raises(TargetError, match=f"the backend 'tensorrt' compiles nothing for sm_90 here: it {missing}"):
        competitors("auto,tensorrt", TARGET)
    assert "tensorrt" not in [one.name for one in competitors("auto", TARGET).backends]


def test_a_package_without_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.ir.machine.extras.is_installed", lambda module: True)

    def fail(name: str) -> None:
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(library_side, "import_module", fail)
    with pytest.raises(TargetError, match=r"TensorRT, which does not load: libnvinfer.so.11: cannot open"):
        Tensorrt().toolchain()


def test_another_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Target.named("sm_80")
    monkeypatch.setattr(library_side.Target, "detect", lambda device: other)
    reason = "it builds engines for sm_90 only on such a GPU; the GPU of this machine: sm_80"
    assert library_side.missing_here("sm_90") == reason and library_side.missing_here("sm_80") == ""
    assert on_request(TARGET)["tensorrt"] == reason
    assert [one.name for one in competitors("tensorrt", other).backends] == [
        "tensorrt",
        "triton",
        "reference",
        "rowwise",
    ]


def test_the_identity_has_version_and_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region("r0", parse_program(LAYER), "tensorrt")
    first = exe_document(region, backend(), TARGET)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.module("11.4.0.106"))
    second = exe_document(region, backend(), TARGET)
    monkeypatch.setattr(emit_side, "product_here", lambda: "NVIDIA H100")
    third = exe_document(region, backend(), TARGET)
    assert len({str(one) for one in (first, second, third)}) == 3
    assert backend().toolchain().keys() == {"tensorrt", "onnx", "gpu"}


def test_what_tensorrt_refuses_is_named(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = parse_program(LAYER)
    monkeypatch.setattr(fake_tensorrt, "PARSED", fake_tensorrt.PARSED - {"Gemm"})
    with pytest.raises(
        BackendError, match=r"does not parse the ONNX model: no importer is registered \(node n\d+, Gemm\)"
    ):
        backend().emit(body, "key", TARGET, tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.module())
    monkeypatch.setattr("ingot.backends.tensorrt.profile.profile_of", lambda body: {})
    with pytest.raises(BackendError, match="does not build an engine: no range of shapes for") as caught:
        backend().emit(body, "key", TARGET, tmp_path)
    assert caught.value.where == "region layer"


@pytest.mark.parametrize(
    ("damage", "error", "what"),
    [
        ("engine", BackendError, "does not load: the magic tag does not match"),
        ("record", BackendError, "region.json or region.engine cannot be read"),
        ("lost", BackendError, "region.json or region.engine cannot be read"),
        ("version", TargetError, "built with TensorRT 11.0.0.1, and here is 11.1"),
        ("gpu", TargetError, "built with the GPU NVIDIA H20, and here is NVIDIA H200"),
        ("memory", BackendError, "needs 4096 bytes of memory for a call"),
        ("tensors", BackendError, "the TensorRT engine has the tensors"),
    ],
)
def test_damaged_files_and_other_machines(
    damage: str, error: type[Exception], what: str, world: World, tmp_path: Path
) -> None:
    executable, _ = emitted(parse_program(LAYER), tmp_path)
    record = Record.model_validate_json((tmp_path / RECORD).read_text())
    changes: dict[str, Any] = {
        "version": {"tensorrt": "11.0.0.1"},
        "gpu": {"gpu": "NVIDIA H20"},
        "memory": {"memory": fake_tensorrt.MEMORY - 1},
        "tensors": {"inputs": ("y", *record.inputs[1:])},
    }
    if damage == "engine":
        (tmp_path / ENGINE).write_bytes(b"damaged")
    elif damage == "record":
        (tmp_path / RECORD).write_text("{}")
    elif damage == "lost":
        (tmp_path / ENGINE).unlink()
    else:
        (tmp_path / RECORD).write_text(record.model_copy(update=changes[damage]).model_dump_json())
    with pytest.raises(error, match=what):
        load(executable, tmp_path, on_one_device("cpu"))


def test_a_failed_run_is_an_error(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = emitted(parse_program(LAYER), tmp_path)
    monkeypatch.setattr(fake_tensorrt, "MEMORY", fake_tensorrt.MEMORY + 1)
    with pytest.raises(BackendError, match="the TensorRT engine fails: 4096 bytes of device memory"):
        run(*layer_inputs(2))


def test_the_load_side_imports_no_onnx() -> None:
    code = "import sys, ingot.backends.tensorrt.load; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert not {name for name in found if name.partition(".")[0] in ("onnx", "onnxruntime", "tensorrt")}
    assert "ingot.backends.tensorrt.build" not in found


def test_native_dtypes_are_those_of_the_documentation() -> None:
    assert NATIVE.products == {torch.bfloat16} and NATIVE.moves == {torch.bfloat16, torch.float16}
