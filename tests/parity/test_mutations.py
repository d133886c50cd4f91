"""Every flag and constant of a dense decoder shows: without it log-probabilities move by 100 times what parity allows.

Each mutation changes what is traced from a checkpoint (or a table made for it) and runs through the interpreter.
`test_transformers.py` shows that the unchanged program agrees with transformers, so it would catch each of these.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MAX_SEQ_LEN, TINY

from ingot.compiler import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir import ops
from ingot.ir.errors import CheckpointError, IngotError
from ingot.ir.harness import InterpreterRun, teacher_forced
from ingot.ir.parse import parse_program
from ingot.ir.program import ModelSpec, Program
from ingot.ir.text import print_program
from ingot.models import dense
from ingot.models.architectures import read_spec
from ingot.models.config import RopeSpec
from ingot.models.dense import DenseSpec

# One worker, for the traces that tests share.
pytestmark = pytest.mark.xdist_group("mutations")

MOVED = 100 * 1e-4  # 100 × the tolerance of test_transformers.py
LIMITS = Limits(MAX_SEQ_LEN, 8, 1024)

Params = dict[str, torch.Tensor]


def _unchanged_spec(dims: DenseSpec) -> DenseSpec:
    return dims


def _unchanged_program(program: Program, params: Params) -> None:
    pass


@dataclass(frozen=True)
class Mutation:
    """`field` is what it removes or alters, in DenseSpec or RopeSpec; `applies` to which checkpoints."""

    name: str
    field: str
    applies: Callable[[DenseSpec], bool]
    spec: Callable[[DenseSpec], DenseSpec] = _unchanged_spec
    program: Callable[[Program, Params], None] = _unchanged_program


def _rope(**changes: Any) -> Callable[[DenseSpec], DenseSpec]:
    return lambda dims: replace(dims, rope=replace(dims.rope, **changes))


def _constant(name: str, value: float) -> Callable[[DenseSpec], DenseSpec]:
    def change(dims: DenseSpec) -> DenseSpec:
        constants = tuple((key, value if key == name else old) for key, old in dims.rope.constants)
        return replace(dims, rope=replace(dims.rope, constants=constants))

    return change


def _without_rotation(program: Program, params: Params) -> None:
    half = params["rope_table"].shape[1] // 2
    params["rope_table"] = torch.cat([torch.ones(MAX_SEQ_LEN, half), torch.zeros(MAX_SEQ_LEN, half)], -1)


def _rotation_of_neighbours(program: Program, params: Params) -> None:
    """Pairs (0, 1), (2, 3), … instead of (0, d/2), (1, d/2 + 1), …: q and k in another order, rotated, and back."""
    for name in [name for name in params if name.endswith((".q.weight", ".k.weight", ".q.bias", ".k.bias"))]:
        head_dim = params["rope_table"].shape[1]
        order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
        rows = params[name].unflatten(0, (-1, head_dim))
        params[name] = rows[:, order].flatten(0, 1)
    for name in [name for name in params if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        params[name] = params[name][order]


def _scale_from_hidden(program: Program, params: Params) -> None:
    inputs = params["layers.0.q.weight"].shape[1]
    for node in program.calls(ops.attention.overload):
        heads = params["layers.0.q.weight"].shape[0] * node.kwargs["scale"] ** 2
        node.kwargs = {**node.kwargs, "scale": (inputs // round(heads)) ** -0.5}


def _grouped_by_turns(program: Program, params: Params) -> None:
    """Query head i with key-value head i % kv_heads instead of i // group: the same heads in another order."""
    head_dim = params["rope_table"].shape[1]
    heads, kv_heads = (params[f"layers.0.{name}.weight"].shape[0] // head_dim for name in ("q", "k"))
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()
    for name in [name for name in params if name.endswith((".q.weight", ".q.bias"))]:
        params[name] = params[name].unflatten(0, (heads, head_dim))[order].flatten(0, 1)
    for name in [name for name in params if name.endswith(".o.weight")]:
        params[name] = params[name].unflatten(1, (heads, head_dim))[:, order].flatten(1, 2)


def _always(dims: DenseSpec) -> bool:
    return True


MUTATIONS = (
    Mutation("last layer left out", "layers", _always, lambda dims: replace(dims, layers=dims.layers - 1)),
    Mutation("head tied", "tied", lambda dims: not dims.tied, lambda dims: replace(dims, tied=True)),
    Mutation("no q/k norm", "qk_norm", lambda dims: dims.qk_norm, lambda dims: replace(dims, qk_norm=False)),
    Mutation(
        "no attention bias",
        "attention_bias",
        lambda dims: dims.attention_bias,
        lambda dims: replace(dims, attention_bias=False),
    ),
    Mutation("no mlp bias", "mlp_bias", lambda dims: dims.mlp_bias, lambda dims: replace(dims, mlp_bias=False)),
    Mutation("norm_eps 1e-6", "norm_eps", _always, lambda dims: replace(dims, norm_eps=1e-6)),
    Mutation(
        "scale from hidden / heads",
        "head_dim",
        lambda dims: dims.head_dim != dims.hidden // dims.heads,
        program=_scale_from_hidden,
    ),
    Mutation("heads grouped by turns", "kv_heads", lambda dims: dims.kv_heads < dims.heads, program=_grouped_by_turns),
    Mutation("no rotation", "rope", _always, program=_without_rotation),
    Mutation("neighbours rotated", "rope", _always, program=_rotation_of_neighbours),
    Mutation(
        "half of a head rotated",
        "rope.rotary_dim",
        _always,
        lambda dims: replace(dims, rope=replace(dims.rope, rotary_dim=dims.head_dim // 4 * 2)),
    ),
    Mutation("theta 10000", "rope.theta", _always, _rope(theta=10000.0)),
    Mutation(
        "rope default",
        "rope.rope_type",
        lambda dims: dims.rope.rope_type != "default",
        _rope(rope_type="default", constants=()),
    ),
    Mutation(
        "llama3 taken for linear",
        "rope.rope_type",
        lambda dims: dims.rope.rope_type == "llama3",
        lambda dims: replace(
            dims,
            rope=replace(dims.rope, rope_type="linear", constants=(("factor", dict(dims.rope.constants)["factor"]),)),
        ),
    ),
    Mutation(
        "no factor", "rope.constants.factor", lambda dims: dims.rope.rope_type != "default", _constant("factor", 1.0)
    ),
    *(
        Mutation(
            f"{constant} {value:g}",
            f"rope.constants.{constant}",
            lambda dims: dims.rope.rope_type == "llama3",
            _constant(constant, value),
        )
        # Llama 3.1's own where these differ from it.
        for constant, value in (("low_freq_factor", 0.5), ("high_freq_factor", 8.0), ("original_max_position", 8192.0))
    ),
)
# Sizes that no checkpoint fits when they are wrong: reading refuses, before any number is wrong.
SIZES = ("hidden", "heads", "ffn", "vocab")


def _spec(folder: Path) -> ModelSpec:
    return read_spec(json.loads((folder / "config.json").read_text()))


@functools.cache
def _traced(spec: ModelSpec) -> Program:
    return trace(spec, LIMITS).entries["main"]


def _logprobs(folder: Path, name: str, mutation: Mutation | None = None) -> list[torch.Tensor]:
    opened = Checkpoint.open(folder)
    spec = read_spec(opened.config)
    if mutation is not None:
        spec = replace(spec, dims=mutation.spec(spec.dims))
    # Of the constants of rope only the recipe of its table knows, so all of them share a trace, which takes a second.
    program = _traced(replace(spec, dims=_rope(rope_type="default", theta=1.0, constants=())(spec.dims)))
    recipes = dense.weight_map(spec.dims, LIMITS.max_seq_len)
    params = {param: recipe.execute(opened.read) for param, recipe in recipes.items()}
    if mutation is not None:
        program = parse_program(print_program(program))  # a copy
        mutation.program(program, params)
    logits = teacher_forced(program.input_types(), InterpreterRun(program, params), TINY[name].prompts())
    return [rows.double().log_softmax(-1) for rows in logits]


@pytest.fixture(scope="session")
def plain(checkpoint: Callable[[str], Path]) -> Callable[[str], list[torch.Tensor]]:
    """Log-probabilities of the unchanged program by the checkpoint's name."""
    return functools.cache(lambda name: _logprobs(checkpoint(name), name))


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_mutation_moves_logprobs(
    mutation: Mutation,
    everywhere: bool,
    checkpoint: Callable[[str], Path],
    plain: Callable[[str], list[torch.Tensor]],
) -> None:
    """In the first checkpoint of each family that has what is mutated, or in all of them."""
    names = [name for name in TINY if mutation.applies(_spec(checkpoint(name)).dims)]
    if not everywhere:
        names = list({TINY[name].family: name for name in reversed(names)}.values())
    assert names, "no checkpoint has what is mutated"
    moved: dict[str, float] = {}
    for name in names:
        mutated = _logprobs(checkpoint(name), name, mutation)
        moved[name] = max(float((one - other).abs().max()) for one, other in zip(plain(name), mutated, strict=True))
    print(f"{mutation.name}:", ", ".join(f"{name} {value:.3g}" for name, value in moved.items()))
    assert min(moved.values()) >= MOVED, moved


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-biased"])
def test_without_a_mutation_nothing_moves(
    name: str, checkpoint: Callable[[str], Path], plain: Callable[[str], list[torch.Tensor]]
) -> None:
    """What moves above is the mutation, not the copy that it is made in."""
    again = _logprobs(checkpoint(name), name, Mutation("nothing", "", lambda dims: True))
    assert all(torch.equal(one, other) for one, other in zip(plain(name), again, strict=True))


def test_every_field_has_a_mutation(checkpoint: Callable[[str], Path]) -> None:
    mutated = {mutation.field for mutation in MUTATIONS} | set(SIZES)
    needed = {field.name for field in fields(DenseSpec)} - {"rope"}
    needed |= {f"rope.{field.name}" for field in fields(RopeSpec)} - {"rope.constants"}
    for name in TINY:
        needed |= {f"rope.constants.{constant}" for constant, _ in _spec(checkpoint(name)).dims.rope.constants}
    assert not needed - mutated


def test_every_flag_is_both_on_and_off(checkpoint: Callable[[str], Path]) -> None:
    """Within the checkpoints of a family, as far as the family has the flag."""
    for family, flags in (
        ("llama", ("tied", "attention_bias", "mlp_bias")),
        ("qwen3", ("tied", "attention_bias")),
    ):
        specs = [_spec(checkpoint(name)).dims for name in TINY if TINY[name].family == family]
        assert len(specs) == 3
        for flag in flags:
            assert {getattr(dims, flag) for dims in specs} == {True, False}, (family, flag)
        assert {dims.heads // dims.kv_heads for dims in specs} == {1, 2, 3}
        assert {dims.rope.rope_type for dims in specs} == {"default", "linear", "llama3"}


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-plain"])
@pytest.mark.parametrize("size", SIZES)
def test_a_wrong_size_is_refused(name: str, size: str, checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint(name), backend="reference")
    wrong = replace(request.spec, dims=replace(request.spec.dims, **{size: 2 * getattr(request.spec.dims, size)}))
    with pytest.raises(CheckpointError, match="do not fit"):
        replace(request, spec=wrong).trace()


@pytest.mark.parametrize("name", ["llama-biased", "qwen3-plain"])
def test_a_head_that_is_not_tied_is_missed(name: str, checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint(name), backend="reference")
    with pytest.raises(IngotError, match=r"lm_head\.weight"):
        replace(request, spec=replace(request.spec, dims=replace(request.spec.dims, tied=False))).trace()


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias", "qk_norm"])
def test_tensors_of_a_flag_left_out_are_extra(flag: str, checkpoint: Callable[[str], Path]) -> None:
    for name in ("llama-biased", "qwen3-biased"):
        request = Request.read(checkpoint(name), backend="reference")
        if getattr(request.spec.dims, flag):
            without = replace(request.spec, dims=replace(request.spec.dims, **{flag: False}))
            with pytest.raises(CheckpointError, match="extra"):
                replace(request, spec=without).trace()
