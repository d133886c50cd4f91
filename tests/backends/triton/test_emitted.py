"""Every op that the triton backend claims compiles to machine code on a machine without a GPU. The comparison of its
results is strict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from call_oracle import difference
from drawn import drawn, drawn_in_one_of
from eight_bit_samples import NARROW
from emitted_calls import CLAIMED, DTYPES, calls, emit_call, emitting, lowered

from ingot.backends.triton.launches import Launches

pytestmark = pytest.mark.one_in_file(3)


@pytest.mark.slow
def test_every_op_compiles(tmp_path: Path) -> None:
    with emitting(tmp_path) as compiling:
        assert compiling.pool.submit(lowered).result() == {op for op, _ in CLAIMED}
        made = {case: compiling.submit(*case, most=1)[0] for case in CLAIMED}
        for (op, dtype), future in made.items():
            emitted = future.result()
            assert emitted.executable is not None, f"{op} {dtype}: {emitted.refused}"
            launches = Launches.model_validate_json((emitted.folder / "launches.json").read_text())
            kernels = {launch.kernel for launch in launches.launches}
            assert {*emitted.executable.files} == {"launches.json", *kernels}
            assert all((emitted.folder / name).read_bytes().startswith(b"\x7fELF") for name in kernels)
            assert all(launch.dependent for launch in launches.launches)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["append_attention", "paged_attention"])
def test_attention_compiles_for_heads_of_all_sizes(op: str, dtype: torch.dtype, tmp_path: Path) -> None:
    with emitting(tmp_path) as compiling:
        for number, future in enumerate(compiling.submit(op, dtype)):
            assert future.result().executable is not None, f"{op} {dtype} {number}: {future.result().refused}"


ODD_HEADS = [("append_attention", torch.float32, 1, 80), ("paged_attention", torch.bfloat16, 0, 576)]


@pytest.mark.parametrize(("op", "dtype", "q", "dim"), drawn_in_one_of(2, ODD_HEADS))
def test_odd_heads_compile(op: str, dtype: torch.dtype, q: int, dim: int, tmp_path: Path) -> None:
    """80 float32 are three cache lines, which kernels prefetch: a range in a kernel has a power of two. A key of a
    latent cache spans two tiles."""
    number = next(at for at, call in enumerate(calls(op, dtype)) if call.args[q].shape[2] == dim)
    with emitting(tmp_path) as compiling:
        made = compiling.pool.submit(emit_call, op, dtype, number, tmp_path).result()
    assert made.executable is not None, made.refused


EIGHT_BITS = [("append_attention", 64), ("append_attention", 128), ("paged_attention", 64), ("paged_attention", 576)]
EIGHT_BITS += [("kv_append", 576), ("qk_norm_rope_append", 64)]


@pytest.mark.parametrize(
    ("op", "dim", "place"), drawn_in_one_of(2, [(*one, place) for one in EIGHT_BITS for place in (0, -1)])
)
def test_caches_of_eight_bits_compile(op: str, dim: int, place: int, tmp_path: Path) -> None:
    """For decode with the tokens of the step, and for prefill; heads of 64 and of 128, and a latent cache."""
    numbers = [
        number
        for number, call in enumerate(calls(op, torch.bfloat16))
        if any(one.dtype in NARROW for one in call.tensors) and call.tensors[1].shape[-1] == dim
    ]
    assert numbers, (op, dim)
    with emitting(tmp_path) as compiling:
        made = compiling.pool.submit(emit_call, op, torch.bfloat16, numbers[place], tmp_path).result()
    assert made.executable is not None, made.refused


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("op", "dtype"), drawn(len(CLAIMED) // 3, CLAIMED), ids=str)
def test_the_judge_takes_the_reference_and_nothing_else(op: str, dtype: torch.dtype) -> None:
    for number, call in enumerate(calls(op, dtype)):
        if number % 8:  # a few will do
            continue
        found = call.reference()
        assert difference(call, found) is None
        for index, result in enumerate(found):
            if not result.numel() or result.numel() > 100_000:
                continue
            place = (0,) * result.dim()
            wrong = result.clone()
            if result.dtype is torch.int8:
                wrong[place] = -100 if int(result[place]) >= 0 else 100
            else:
                wrong[place] = float("nan") if result.is_floating_point() and not result[place].isnan() else 77_777
            assert difference(call, [*found[:index], wrong, *found[index + 1 :]]) is not None


@pytest.mark.parametrize(
    "format", drawn_in_one_of(2, ["int8", "int8_w8a8", "fp8", "fp8_block128", "int4_g128", "int4_g128_asym"])
)
def test_quantized_weights_compile(format: str, tmp_path: Path) -> None:
    numbers = [
        number
        for number, call in enumerate(calls("quant_linear", torch.bfloat16))
        if call.kwargs["format"] == format and call.tensors[0].shape[1] > 64
    ]
    assert numbers, format
    with emitting(tmp_path) as compiling:
        made = compiling.pool.submit(emit_call, "quant_linear", torch.bfloat16, numbers[-1], tmp_path).result()
    assert made.executable is not None, made.refused
