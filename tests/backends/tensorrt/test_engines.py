"""Engines of the tensorrt backend with a double of `tensorrt`: numbers, shapes of bucket classes, memory, captures."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_tensorrt
import pytest
import torch
from every_op import L_MAX, T_MAX
from onnx_cases import Built, build_every_op
from staged import traced
from tensorrt_world import LAYER, STREAM, TARGET, World, backend, emitted, layer_inputs, on_device
from tiny import CHECKPOINTS

from ingot.backends.tensorrt.load import load
from ingot.backends.tensorrt.profile import Shapes, profile_of
from ingot.backends.tensorrt.record import ENGINE, RECORD, Record
from ingot.compile.buckets import bucket_classes
from ingot.compile.competing import competing
from ingot.frontend.trace import Limits
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import BackendError, TargetError
from ingot.ir.interpret import interpret
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Region, Stage
from ingot.passes.base import PassContext
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import PIPELINE
from ingot.runtime.loading.load_context import on_one_device

pytestmark = [pytest.mark.xdist_group("tensorrt"), pytest.mark.one_in_file(3)]


@pytest.fixture(
    scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def built(machine: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_every_op(request.param, tmp_path_factory.mktemp("tensorrt"), emitted)


# Numbers, types and shapes.


def test_every_op_on_its_samples(built: Built, world: World) -> None:
    built.check_samples()


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, L_MAX), (T_MAX, L_MAX)])
def test_any_size(built: Built, world: World, tokens: int, rows: int) -> None:
    """One engine for any T and L."""
    built.check_size(tokens, rows)


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
