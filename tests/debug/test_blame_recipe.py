"""Faults in recipes' steps and in packing: the weight is named, the step, and which of the two it was."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from resign import sign
from safetensors.torch import load_file, save_file

from ingot import compile_model
from ingot.debug.bisect.execution.recipe_meanings import step_problem
from ingot.debug.bisect.verdict import Kind
from ingot.ir import recipe
from ingot.ir.formats import FORMATS, find_format, quantize
from ingot.ir.recipe import STEPS, Recipe

Step = Callable[[list[torch.Tensor], Mapping[str, Any]], Any]


def _changed(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, dict):
        return {name: change(tensor) for name, tensor in result.items()}
    return change(result)


def later(step: Step) -> Step:
    """Everything one place further along the first axis."""
    return lambda args, attrs: _changed(step(args, attrs), lambda tensor: tensor.roll(1, 0))


def backwards(step: Step) -> Step:
    return lambda args, attrs: step(args[::-1], attrs)


def doubled(step: Step) -> Step:
    return lambda args, attrs: _changed(step(args, attrs), lambda tensor: (tensor * 2).to(tensor.dtype))


def truncating(step: Step) -> Step:
    """Rounds towards zero."""

    def run(args: list[torch.Tensor], attrs: Mapping[str, Any]) -> torch.Tensor:
        found = step(args, attrs)
        return torch.where(found.float().abs() > args[0].abs(), torch.nextafter(found, torch.zeros_like(found)), found)

    return run


def unscaled(step: Step) -> Step:
    return lambda args, attrs: step(args, {**attrs, "scale": 1.0, "offset": 0.0})


def packed_high_first(step: Step) -> Step:
    def run(args: list[torch.Tensor], attrs: Mapping[str, Any]) -> Any:
        parts = step(args, attrs)
        return {**parts, "weight": (parts["weight"] >> 4) | (parts["weight"] << 4)}

    return run


def coarse(step: Step) -> Step:
    """Scales of twice the size, and the codes that fit them."""

    def run(args: list[torch.Tensor], attrs: Mapping[str, Any]) -> Any:
        parts = step(args, attrs)
        scales = parts["scales"] * 2
        codes = (args[0] / scales).round().to(torch.int8)
        return {"weight": codes, "scales": scales}

    return run


# A step, the fault, the checkpoint whose recipes have it, and options of the compile.
FAULTS: dict[str, tuple[str, Callable[[Step], Step], str, dict[str, str]]] = {
    "rows of a concat swapped": ("concat", backwards, "qwen3-scaled", {}),
    "a slice one row off": ("slice", later, "phi3-short", {}),
    "a table of other positions": ("table", later, "qwen3-scaled", {}),
    "a table of another scale": ("table", doubled, "llama-yarn", {}),
    "a gain without its offset": ("affine", unscaled, "gemma-tied", {}),
    "a cast that truncates": ("cast", truncating, "qwen3-scaled", {"dtype": "bfloat16"}),
    "scales too large": ("quantize", coarse, "qwen3-scaled", {"passes": "default,quantize{format=int8}"}),
}


@pytest.fixture
def compiled(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    def get(name: str, **options: Any) -> Path:
        folder = tmp_path / f"{name}.ingot"
        limits = {"max_batch": 2, "max_tokens": 32, "max_seq_len": 64}
        compile_model(checkpoint(name), folder, backend="reference", **limits, **options)
        return folder

    return get


def plant(patch: pytest.MonkeyPatch, step: str, fault: Callable[[Step], Step]) -> None:
    patch.setattr(recipe, "STEPS", {**STEPS, step: fault(STEPS[step])})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_step_is_named(
    name: str, compiled: Callable[..., Path], blame: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fault, model, options = FAULTS[name]
    plant(monkeypatch, step, fault)
    verdict = blame(compiled(model, **options), model)
    assert verdict is not None and (verdict.kind, verdict.blamed) == (Kind.RECIPE, step), verdict
    assert f"the step {step}(" in verdict.found and verdict.node


@pytest.mark.parametrize("name", ["rows of a concat swapped", "a gain without its offset"])
def test_a_step_that_was_faulty_while_packing(
    name: str, compiled: Callable[..., Path], blame: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fault, model, options = FAULTS[name]
    with monkeypatch.context() as patch:
        plant(patch, step, fault)
        folder = compiled(model, **options)
    verdict = blame(folder, model)
    assert verdict is not None and (verdict.kind, verdict.blamed) == (Kind.WEIGHTS, step), verdict
    assert "the artifact has" in verdict.found


def _raising(step: Step) -> Step:
    """A part that does not fit the others: torch raises."""
    return lambda args, attrs: step([args[0][..., None], *args[1:]], attrs)


def _wider(step: Step) -> Step:
    return lambda args, attrs: _changed(step(args, attrs), lambda tensor: torch.cat([tensor, tensor[:1]]))


@pytest.mark.parametrize(
    ("fault", "words"),
    [(_raising, "cannot be applied"), (_wider, "is wrong: it is torch.float32")],
    ids=["does not fit", "another shape"],
)
def test_a_step_of_shapes_that_do_not_fit(
    fault: Callable[[Step], Step],
    words: str,
    artifact: Callable[..., Path],
    blame: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = artifact("llama-biased", backend="reference")
    plant(monkeypatch, "concat", fault)
    verdict = blame(folder, "llama-biased")
    assert verdict is not None and (verdict.kind, verdict.blamed) == (Kind.RECIPE, "concat"), verdict
    assert words in verdict.found and verdict.node


def test_a_changed_byte_is_of_no_step(artifact: Callable[..., Path], blame: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "faulty.ingot"
    shutil.copytree(artifact("llama-biased", backend="reference"), folder)
    file = folder / "weights" / "00000.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"][3] += 1
    save_file(tensors, file)
    sign(folder, "weights/00000.safetensors")
    verdict = blame(folder, "llama-biased")
    assert verdict is not None and (verdict.kind, verdict.node) == (Kind.WEIGHTS, "norm.weight"), verdict
    assert "at [3], the recipe makes" in verdict.found


@pytest.mark.parametrize("seed", range(4))
def test_meanings_are_what_the_steps_do(seed: int) -> None:
    """Every step that moves elements, on random shapes; and none of them when a single element is wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 4, 8, generator=generator).to(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64][seed]
    )
    calls: list[tuple[str, list[torch.Tensor], dict[str, Any]]] = [
        ("slice", [x], {"dim": 1, "begin": 1, "end": 3}),
        ("slice", [x], {"dim": 2, "begin": 2, "end": 4, "every": 4}),
        ("concat", [x, x[:, :1], x + 1], {"dim": 1}),
        ("stack", [x, x + 1], {"dim": 2}),
        ("reshape", [x], {"shape": (8, 24)}),
        ("permute", [x], {"dims": (2, 0, 1)}),
        ("pad", [x], {"dim": 1, "size": 7}),
        ("repeat", [x], {"dim": 0, "times": 3}),
        ("shard", [x], {"dim": 0, "segments": (4, 2), "rank": 1, "world": 2}),
        ("split", [x], {"dim": 2, "sizes": (3, 5)}),
        ("affine", [x], {"scale": 1.5, "offset": 1.0}),
        ("cast", [x], {"dtype": "f16" if seed == 1 else "bf16"}),
        ("normalize", [x], {}),
        ("matmul", [x[0], x[1].t().contiguous()], {}),
        ("add", [x, x.flip(0).contiguous()], {}),
        ("bitcast", [x], {"dtype": {2: "f16", 4: "f32", 8: "f64"}[x.element_size()]}),
        ("gather", [x, torch.tensor([2, 0, 3], dtype=torch.int32)], {"dim": 1}),
        ("check_scales", [x], {"zero": False}),
        ("multiply", [x, x[:1]], {}),
        ("reciprocal", [x], {}),
        ("lookup", [x, torch.tensor([[3, 180], [7, 0]], dtype=torch.uint8)], {}),
    ]
    for step, args, attrs in calls:
        found = STEPS[step](args, attrs)
        assert step_problem(step, args, attrs, found) is None, step
        wrong = _changed(found, lambda tensor: tensor.clone())
        last = list(wrong.values())[-1] if isinstance(wrong, dict) else wrong
        last.view(-1)[-1] += 1
        assert "1 of" in (step_problem(step, args, attrs, wrong) or ""), step


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_meanings_of_steps_with_codes(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(-(2**31), 2**31, (6, 12), generator=generator, dtype=torch.int64).to(torch.int32)
    codes = STEPS["unpack"]([words], {"bits": bits, "dim": 0, "size": 0, "order": ()})
    calls: list[tuple[str, list[torch.Tensor], dict[str, Any]]] = [
        ("unpack", [words], {"bits": bits, "dim": 0, "size": 0, "order": ()}),
        ("unpack", [words], {"bits": bits, "dim": 1, "size": 40, "order": (1, 0, 3, 2)}),
        ("shift", [codes], {"add": 1, "bits": bits}),
        ("pack", [codes & 15], {"packing": "low_first"}),
        ("group_order", [torch.tensor([2, 0, 1, 1, 0, 2], dtype=torch.int32)], {"size": 2}),
    ]
    for step, args, attrs in calls:
        found = STEPS[step](args, attrs)
        assert step_problem(step, args, attrs, found) is None, step
        wrong = found.clone()
        wrong.view(-1)[-1] ^= 1
        assert "1 of" in (step_problem(step, args, attrs, wrong) or ""), step


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_by_every_format(name: str) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    x[2] *= 30
    x[3, :128] = x[3, :128].abs() + 1  # a range that zero is outside of
    attrs = {"format": name}
    parts = STEPS["quantize"]([x], attrs)
    assert step_problem("quantize", [x], attrs, parts) is None
    whole = STEPS["dequantize"]([parts[part] for part in parts], attrs)
    assert step_problem("dequantize", list(parts.values()), attrs, whole) is None
    assert "5 of" in (step_problem("dequantize", list(parts.values()), attrs, whole + torch.eye(5, 256)) or "")
    assert step_problem("quantize", [x + torch.eye(5, 256) * 9], attrs, parts) is not None
    if FORMATS[name].packing == "low_first":
        swapped = packed_high_first(STEPS["quantize"])([x], attrs)
        assert "more than half a step off" in (step_problem("quantize", [x], attrs, swapped) or "")


def alibi(heads: int, flattest: float, factor: float) -> dict[str, object]:
    return {"kind": "alibi", "heads": heads, "flattest": flattest, "factor": factor}


@pytest.mark.parametrize(
    "attrs",
    [
        *(alibi(8, 8.0, 1.0), alibi(6, 8.0, 1.0), alibi(13, 4.0, 0.5), alibi(1, 8.0, 1.0)),
        *({"kind": "ones", "size": 24}, {"kind": "hadamard", "size": 16}),
    ],
    ids=str,
)
def test_tables(attrs: dict[str, object]) -> None:
    """One wrong element is noticed."""
    table = STEPS["table"]([], attrs)
    assert isinstance(table, torch.Tensor) and step_problem("table", [], attrs, table) is None
    wrong = table.clone()
    wrong.view(-1)[-1] *= 1 + 1e-6
    assert f"1 of {wrong.numel()}" in (step_problem("table", [], attrs, wrong) or "")


def test_rotations() -> None:
    """A weight of a format with rotations, and the matrix of one; a wrong matrix is noticed."""
    g = torch.Generator().manual_seed(0)
    matrix = STEPS["table"]([], {"kind": "hadamard", "size": 16})
    turns = {"rotation_in": matrix / 4, "rotation_out": torch.linalg.qr(torch.randn(4, 4, generator=g)).Q}
    parts = {**quantize(torch.randn(8, 32, generator=g), find_format("int8")), **turns}
    attrs = {"format": "i8/1x*:f32/rotated_in=16/rotated_out=4"}
    found = STEPS["dequantize"](list(parts.values()), attrs)
    assert step_problem("dequantize", list(parts.values()), attrs, found) is None
    turned = [*list(parts.values())[:-1], turns["rotation_out"].T]
    assert step_problem("dequantize", turned, attrs, found) is not None


def test_in_order_each_step_stands_once() -> None:
    from ingot.debug.bisect.execution.blame_recipe import _in_order

    parts = recipe.split(recipe.source("w"), 0, (2, 2))
    whole = recipe.concat([parts[1], parts[0], parts[1]])
    order = _in_order(whole)
    assert [one.step for one in order] == ["source", "split", "concat"] and isinstance(order[0], Recipe)
