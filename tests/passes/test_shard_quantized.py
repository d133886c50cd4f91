"""quantize and shard together: each rank has its part of what stands for a weight, and computes the same."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from sharded import open_model
from staged import Step, logits_of, pass_context, staged
from tiny_checkpoint import Tiny

from ingot.ir.errors import OptionError
from ingot.ir.mesh import ranks
from ingot.ir.numerics.contracts import breach
from ingot.ir.numerics.tolerances import compare
from ingot.ir.program import Model, Program, Stage
from ingot.ir.types import Placement
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import edit_pipeline, pipeline_for

MESH = {"tp": 2}
# Biases everywhere, one head of k and v for two ranks, and rows of whole groups of 32 on each rank.
MODEL = Tiny(
    "llama-on-mesh",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 151,
        "rms_norm_eps": 0.01,
        "rope_theta": 1000.0,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 160,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    },
    seed=7,
)
REQUESTS = [[5, 17, 3, 60, 2, 41], [11], list(range(40))]
Opened = Callable[..., tuple[Model, Callable[[str], torch.Tensor]]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    known: dict[tuple[tuple[str, Any], ...], tuple[Model, Callable[[str], torch.Tensor]]] = {}

    def get(**changes: Any) -> tuple[Model, Callable[[str], torch.Tensor]]:
        key = tuple(sorted(changes.items()))
        if key not in known:
            known[key] = open_model(MODEL.write(tmp_path_factory.mktemp("quantized") / "checkpoint", **changes))
        return known[key]

    return get


def brought(model: Model, format: str, mesh: Mapping[str, int]) -> dict[str, Step]:
    """What each pass made of the model, by the pass that ran last; those of the fused stage on."""
    pipeline = edit_pipeline(f"default,quantize{{format={format}}}", pipeline_for(mesh))
    return {step.name: step for step in staged(model, pipeline, mesh=mesh)[0]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ["int8", "int8_tensor", "int8_g32", "int4_g32_asym"])
def test_ranks_compute_what_one_device_does(format: str, opened: Opened) -> None:
    model, read = opened()
    alone, steps = (brought(model, format, mesh) for mesh in ({}, MESH))
    before, after = (logits_of(steps[name].program, read, REQUESTS) for name in ("quantize", "insert-collectives"))
    record = steps["shard"].record
    assert record is not None and breach(record.numerics, before, after, torch.float32) is None
    for last in ("insert-ending", "merge-linears", "fuse-qk-norm-rope"):
        found, wanted = (logits_of(one[last].program, read, REQUESTS) for one in (steps, alone))
        assert compare(found.exact, wanted.exact, torch.float64, factor=100) is None, last
        assert compare(found.found, wanted.found, torch.float32) is None, last


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("format", "scales_by_row", "scales_by_column"),
    [("int8", True, False), ("int8_tensor", False, False), ("int8_g32", True, True), ("int4_g32_asym", True, True)],
)
def test_a_rank_has_its_part_of_each_weight(
    format: str, scales_by_row: bool, scales_by_column: bool, opened: Opened
) -> None:
    """Of q, k, v, gate and up by rows, of o and down by columns; k and v of one head are repeated."""
    model, read = opened()
    steps = brought(model, format, MESH)
    whole, program = steps["quantize"].program, steps["insert-collectives"].program
    for name, spec in program.params.items():
        linear, _, part = name.removeprefix("layers.0.").rpartition(".")
        dim = {"attention.o": 1, "mlp.down": 1}.get(linear, 0)
        if not linear.startswith(("attention.", "mlp.")):
            continue
        splits = part == "qweight" or (scales_by_column if dim else scales_by_row)
        if part == "bias":
            splits = dim == 0
        assert spec.placement == ((Placement("tp", "shard", dim),) if splits else ()), name
        stored = whole.params[name].recipe.execute(read)
        if linear in ("attention.k", "attention.v") and splits:
            stored = stored.repeat(2, *(1 for _ in stored.shape[1:]))
        parts = stored.chunk(2, dim) if splits else (stored, stored)
        for rank, wanted in zip(ranks(MESH), parts, strict=True):
            assert torch.equal(spec.recipe.for_rank(rank).execute(read), wanted), name


def refused(opened: Opened, format: str, **changes: Any) -> OptionError:
    model, _ = opened(**changes)
    pipeline = edit_pipeline(f"default,quantize{{format={format}}}", pipeline_for(MESH))
    with pytest.raises(OptionError) as caught:
        run_pipeline(model, pass_context(bucket=None, mesh=MESH), (), pipeline, upto=Stage.SHARDED)
    return caught.value


def test_heads_that_do_not_divide_are_refused_as_before_quantizing(opened: Opened) -> None:
    error = refused(opened, "int8", num_attention_heads=5, attention_bias=False)
    assert error.what == "'layers.0.attention.q.qweight' has 5 parts of 16, which do not divide among 2 ranks"
    assert error.where == "mesh tp=2"


def test_a_rank_has_whole_groups_or_the_mesh_is_refused(opened: Opened) -> None:
    """Three groups of 32 elements, which are 16 bytes each; without groups the same weight divides."""
    error = refused(opened, "int4_g32_asym", intermediate_size=96)
    assert error.what == "'layers.0.mlp.down.qweight' has 3 parts of 16, which do not divide among 2 ranks"
    model, _ = opened(intermediate_size=96)
    program: Program = brought(model, "int8", MESH)["shard"].program
    assert program.params["layers.0.mlp.down.qweight"].type.shape == (64, 48)
