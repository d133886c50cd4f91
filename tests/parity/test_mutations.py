"""Every flag and constant of a dense decoder shows: without it log-probabilities move by 100 times what parity allows.

Each mutation changes what is traced from a checkpoint (or a table made for it) and runs through the interpreter.
`test_transformers.py` shows that the unchanged program agrees with transformers, so it would catch each of these.
"""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_seed import again, run_seed
from tiny import TINY

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir.errors import CheckpointError, IngotError
from ingot.ir.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.program import ModelSpec
from ingot.models.architectures import ARCHITECTURES, read_spec
from ingot.models.config import RopeSpec
from ingot.models.dense import DenseSpec, LayerSpec
from ingot.request import Request

# One worker, for the traces that tests share.
pytestmark = pytest.mark.xdist_group("mutations")

# Which checkpoint is mutated where one is enough: the first one that has what is mutated. The commit draws the order.
ORDER = random.Random(run_seed()).sample([*TINY], len(TINY))
MOVED = 100 * 1e-4  # 100 × the tolerance of test_transformers.py

Params = dict[str, torch.Tensor]
Change = Callable[[DenseSpec], DenseSpec]


def _unchanged(dims: DenseSpec) -> DenseSpec:
    return dims


def _unchanged_params(params: Params, dims: DenseSpec) -> None:
    pass


@dataclass(frozen=True)
class Mutation:
    """`field` is what it removes or alters, in DenseSpec, LayerSpec or RopeSpec; `applies` to which checkpoints, save
    those that `unless` names, where it cannot show. It moves a log-probability by `moved` or more."""

    name: str
    field: str
    applies: Callable[[DenseSpec], Any]
    spec: Change = _unchanged
    params: Callable[[Params, DenseSpec], None] = _unchanged_params
    unless: tuple[str, ...] = ()
    moved: float = MOVED


def _always(dims: DenseSpec) -> bool:
    return True


def _with(**changes: Any) -> Change:
    return lambda dims: replace(dims, **changes)


def _layers(change: Callable[[LayerSpec], LayerSpec]) -> Change:
    return lambda dims: replace(dims, layers=tuple(map(change, dims.layers)))


def _ropes(change: Callable[[RopeSpec], RopeSpec]) -> Change:
    return lambda dims: replace(dims, ropes=tuple(map(change, dims.ropes)))


def _constant(name: str, value: Any) -> Change:
    def change(rope: RopeSpec) -> RopeSpec:
        return replace(rope, constants=tuple((key, value if key == name else old) for key, old in rope.constants))

    return _ropes(change)


def _has(constant: str, value: Any = None) -> Callable[[DenseSpec], bool]:
    """Some table has this constant, and not with this value."""
    return lambda dims: any(key == constant and old != value for rope in dims.ropes for key, old in rope.constants)


def _kind(rope_type: str) -> Callable[[DenseSpec], bool]:
    return lambda dims: any(rope.rope_type == rope_type for rope in dims.ropes)


def _ones(constant: str) -> Change:
    def change(rope: RopeSpec) -> RopeSpec:
        constants = ((key, (1.0,) * len(old) if key == constant else old) for key, old in rope.constants)
        return replace(rope, constants=tuple(constants))

    return _ropes(change)


def _half_rotated(dims: DenseSpec) -> DenseSpec:
    return _ropes(lambda rope: replace(rope, rotary_dim=rope.rotary_dim // 4 * 2))(dims)


def _all_rotated(dims: DenseSpec) -> DenseSpec:
    def widened(rope: RopeSpec) -> RopeSpec:
        more = (dims.head_dim - rope.rotary_dim) // 2
        constants = ((key, (*old, *old[-1:] * more) if isinstance(old, tuple) else old) for key, old in rope.constants)
        return replace(rope, rotary_dim=dims.head_dim, constants=tuple(constants))

    return _ropes(widened)(dims)


def _llama3_for_linear(rope: RopeSpec) -> RopeSpec:
    if rope.rope_type != "llama3":
        return rope
    return replace(rope, rope_type="linear", constants=(("factor", dict(rope.constants)["factor"]),))


def _without_rotation(params: Params, dims: DenseSpec) -> None:
    for name in [name for name in params if name.startswith("ropes.")]:
        rows, half = params[name].shape[0], params[name].shape[1] // 2
        params[name] = torch.cat([torch.ones(rows, half), torch.zeros(rows, half)], -1)


def _grouped_by_turns(params: Params, dims: DenseSpec) -> None:
    """Query head i with key-value head i % kv_heads instead of i // group: the same heads in another order."""
    order = torch.arange(dims.heads).view(-1, dims.kv_heads).T.flatten()
    split = (dims.heads, dims.head_dim)
    for name in [name for name in params if name.endswith((".q.weight", ".q.bias"))]:
        params[name] = params[name].unflatten(0, split)[order].flatten(0, 1)
    for name in [name for name in params if name.endswith(".o.weight")]:
        params[name] = params[name].unflatten(1, split)[:, order].flatten(1, 2)
    for name in [name for name in params if name.endswith("q_norm.weight")]:
        if dims.qk_norm == "full":
            params[name] = params[name].unflatten(0, split)[order].flatten(0, 1)
        elif params[name].dim() == 2:
            params[name] = params[name][order]


def _windowed(dims: DenseSpec) -> bool:
    return any(layer.window for layer in dims.layers)


def _window_of(dims: DenseSpec) -> int:
    return next(layer.window for layer in dims.layers if layer.window)


# What a flag's absence is, where it is one value: the checkpoints that have another one.
WITHOUT: tuple[tuple[str, Any], ...] = (
    ("norm_offset", 0.0),
    ("parallel", False),
    ("qk_norm", None),
    ("qkv_bias", False),
    ("o_bias", False),
    ("mlp_bias", False),
    ("activation", "silu"),
    ("attention_scale", None),
    ("attention_soft_cap", None),
    ("logit_soft_cap", None),
    ("embed_scale", None),
    ("residual_scale", None),
    ("logit_scale", None),
)


def _differs(field: str, value: Any) -> Callable[[DenseSpec], bool]:
    return lambda dims: getattr(dims, field) != value


MUTATIONS = (
    *(Mutation(f"{field} {value}", field, _differs(field, value), _with(**{field: value})) for field, value in WITHOUT),
    Mutation("last layer left out", "layers", _always, lambda dims: replace(dims, layers=dims.layers[:-1])),
    # A layer norm's gains of q and k have a shape of their own.
    Mutation("rms norm", "norm", lambda dims: dims.norm == "layer" and dims.qk_norm is None, _with(norm="rms")),
    Mutation("head tied", "tied", lambda dims: not dims.tied, _with(tied=True)),
    Mutation("norm_eps 1e-6", "norm_eps", _always, _with(norm_eps=1e-6)),
    Mutation("norms only behind", "pre_norm", lambda dims: dims.pre_norm and dims.post_norm, _with(pre_norm=False)),
    Mutation("norms only in front", "post_norm", lambda dims: dims.post_norm, _with(pre_norm=True, post_norm=False)),
    Mutation("norms also in front", "pre_norm", lambda dims: not dims.pre_norm, _with(pre_norm=True)),
    Mutation(
        "exact gelu",
        "activation",
        lambda dims: dims.activation == "gelu_tanh",
        _with(activation="gelu"),
        moved=10 * 1e-4,  # the two differ by 5e-4 at most
    ),
    Mutation(
        "scale from hidden / heads",
        "head_dim",
        lambda dims: dims.attention_scale is None and dims.head_dim != dims.hidden // dims.heads,
        lambda dims: replace(dims, attention_scale=(dims.hidden // dims.heads) ** -0.5),
    ),
    Mutation("heads grouped by turns", "kv_heads", lambda dims: dims.kv_heads < dims.heads, params=_grouped_by_turns),
    Mutation("no window", "layers.window", _windowed, _layers(lambda layer: replace(layer, window=None))),
    Mutation(
        "a window one shorter",
        "layers.window",
        _windowed,
        _layers(lambda layer: replace(layer, window=layer.window and layer.window - 1)),
    ),
    Mutation(
        "a window everywhere",
        "layers.window",
        lambda dims: _windowed(dims) and not all(layer.window for layer in dims.layers),
        lambda dims: _layers(lambda layer: replace(layer, window=_window_of(dims)))(dims),
    ),
    Mutation(
        "every layer rotated by the first table",
        "layers.rope",
        lambda dims: any(layer.rope != 0 for layer in dims.layers),
        _layers(lambda layer: replace(layer, rope=0)),
    ),
    Mutation("no rotation", "ropes", _always, params=_without_rotation),
    Mutation(
        "other pairs rotated",
        "rope_interleaved",
        _always,
        lambda dims: replace(dims, rope_interleaved=not dims.rope_interleaved),
    ),
    Mutation("half of it rotated", "ropes.rotary_dim", lambda dims: not _kind("longrope")(dims), _half_rotated),
    Mutation(
        "the whole head rotated",
        "ropes.rotary_dim",
        lambda dims: any(rope.rotary_dim < dims.head_dim for rope in dims.ropes),
        _all_rotated,
    ),
    Mutation("theta 10000", "ropes.theta", _always, _ropes(lambda rope: replace(rope, theta=10000.0))),
    Mutation(
        "rope default",
        "ropes.rope_type",
        lambda dims: not all(rope.rope_type == "default" for rope in dims.ropes),
        _ropes(lambda rope: replace(rope, rope_type="default", constants=())),
        unless=("llama-dynamic",),  # compiled for the context that needs no stretching
    ),
    Mutation("llama3 taken for linear", "ropes.rope_type", _kind("llama3"), _ropes(_llama3_for_linear)),
    Mutation(
        "no factor", "ropes.constants.factor", _has("factor"), _constant("factor", 1.0), unless=("llama-dynamic",)
    ),
    # Llama 3.1's own, YaRN's defaults, and contexts on the other side of the switch.
    *(
        Mutation(f"{name} {value}", f"ropes.constants.{name}", _has(name, value), _constant(name, value), unless=unless)
        for name, value, unless in (
            ("low_freq_factor", 0.5, ()),
            ("high_freq_factor", 8.0, ()),
            ("original_max_position", 8192.0, ("llama-dynamic", "phi3-short")),
            ("beta_fast", 32.0, ()),
            ("beta_slow", 1.0, ()),
            ("truncate", True, ()),
            ("attention_factor", 1.0, ()),
        )
    ),
    Mutation(
        "compiled beyond the original context",
        "ropes.constants.original_max_position",
        lambda dims: _kind("dynamic")(dims) or _kind("longrope")(dims),
        _constant("original_max_position", 16.0),
        unless=("phi3-long",),
    ),
    *(
        Mutation(f"{name} 1", f"ropes.constants.{name}", _has(name), _ones(name), unless=(other,))
        for name, other in (("short_factor", "phi3-long"), ("long_factor", "phi3-short"))
    ),
)
# What no checkpoint fits when it is wrong: reading refuses, before any number is wrong.
SIZES = ("hidden", "heads", "ffn", "vocab")
STORAGE = ("fused_weights", "post_norm_names")
# What float32 does not show; test_rounding.py does.
ROUNDING = ("norm_wide", "embed_scale_rounded")

# A mutation may ask for a norm that a checkpoint lacks: the one that takes its place.
STAND_INS = {
    "post_attention_layernorm": "input_layernorm",
    "input_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "post_feedforward_layernorm",
}


def _spec(folder: Path) -> ModelSpec:
    return read_spec(json.loads((folder / "config.json").read_text()))


def _logprobs(folder: Path, name: str, mutation: Mutation | None = None) -> list[torch.Tensor]:
    opened = Checkpoint.open(folder)
    spec = read_spec(opened.config)
    if mutation is not None:
        spec = replace(spec, dims=mutation.spec(spec.dims))
    max_seq_len = TINY[name].max_seq_len
    program = trace(spec, Limits(max_seq_len, 8, 1024)).entries["main"]

    def read(stored: str) -> torch.Tensor:
        kind = stored.split(".")[-2]
        if stored not in opened.tensors and kind in STAND_INS:
            stored = stored.replace(kind, STAND_INS[kind])
        return opened.read(stored)

    params = load_params(program.params, read)
    if mutation is not None:
        mutation.params(params, spec.dims)
    logits = teacher_forced(program.input_types(), InterpreterRun(program, params), TINY[name].prompts())
    return [rows.double().log_softmax(-1) for rows in logits]


@pytest.fixture(scope="session")
def plain(checkpoint: Callable[[str], Path]) -> Callable[[str], list[torch.Tensor]]:
    """Log-probabilities of the unchanged program by the checkpoint's name."""
    return functools.cache(lambda name: _logprobs(checkpoint(name), name))


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "all"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_mutation_moves_logprobs(
    mutation: Mutation,
    everywhere: bool,
    checkpoint: Callable[[str], Path],
    plain: Callable[[str], list[torch.Tensor]],
) -> None:
    """In one of the checkpoints that have what is mutated, or in all of them."""
    names = [name for name in TINY if mutation.applies(_spec(checkpoint(name)).dims) and name not in mutation.unless]
    assert names, "no checkpoint has what is mutated"
    if not everywhere:
        names = [min(names, key=ORDER.index)]
    moved: dict[str, float] = {}
    for name in names:
        mutated = _logprobs(checkpoint(name), name, mutation)
        changes = [(one - other).abs().max() for one, other in zip(plain(name), mutated, strict=True)]
        moved[name] = float(torch.stack(changes).max())
        assert moved[name] < float("inf"), "not a number"
    print(f"{mutation.name}:", ", ".join(f"{name} {value:.3g}" for name, value in moved.items()))
    assert min(moved.values()) >= mutation.moved, again(moved)


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-biased"])
def test_without_a_mutation_nothing_moves(
    name: str, checkpoint: Callable[[str], Path], plain: Callable[[str], list[torch.Tensor]]
) -> None:
    """What moves above is the mutation, not the copy that it is made in."""
    again = _logprobs(checkpoint(name), name, Mutation("nothing", "", lambda dims: True))
    assert all(torch.equal(one, other) for one, other in zip(plain(name), again, strict=True))


def test_every_field_has_a_mutation(checkpoint: Callable[[str], Path]) -> None:
    mutated = {mutation.field for mutation in MUTATIONS} | {*SIZES, *STORAGE, *ROUNDING}
    needed = {field.name for field in fields(DenseSpec)} | {f"layers.{field.name}" for field in fields(LayerSpec)}
    needed |= {f"ropes.{field.name}" for field in fields(RopeSpec)} - {"ropes.constants"}
    for name in TINY:
        for rope in _spec(checkpoint(name)).dims.ropes:
            needed |= {f"ropes.constants.{constant}" for constant, _ in rope.constants}
    assert needed == mutated


def test_every_architecture_has_a_checkpoint() -> None:
    assert {tiny.config["architectures"][0] for tiny in TINY.values()} == ARCHITECTURES.keys()


def test_every_flag_is_both_on_and_off(checkpoint: Callable[[str], Path]) -> None:
    """Within three checkpoints of the first two families, as far as the family has the flag."""
    for family, flags in (
        ("llama", ("tied", "qkv_bias", "o_bias", "mlp_bias")),
        ("qwen3", ("tied", "qkv_bias", "o_bias")),
    ):
        specs = [_spec(checkpoint(f"{family}-{kind}")).dims for kind in ("plain", "biased", "scaled")]
        for flag in flags:
            assert {getattr(dims, flag) for dims in specs} == {True, False}, (family, flag)
        assert {dims.heads // dims.kv_heads for dims in specs} == {1, 2, 3}
        assert {dims.ropes[0].rope_type for dims in specs} == {"default", "linear", "llama3"}


def test_weights_stored_apart_are_missed(checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint("phi3-short"), backend="reference")
    apart = replace(request.spec, dims=replace(request.spec.dims, fused_weights=False))
    with pytest.raises(CheckpointError, match="missing"):
        replace(request, spec=apart).trace()


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


@pytest.mark.parametrize("flag", ["qkv_bias", "o_bias", "mlp_bias", "qk_norm", "post_norm"])
def test_tensors_of_a_flag_left_out_are_extra(flag: str, checkpoint: Callable[[str], Path]) -> None:
    for name in ("llama-biased", "qwen3-biased", "gemma2-capped"):
        request = Request.read(checkpoint(name), backend="reference")
        if getattr(request.spec.dims, flag):
            without = replace(
                request.spec, dims=replace(request.spec.dims, **{flag: None if flag == "qk_norm" else False})
            )
            with pytest.raises(CheckpointError, match="extra"):
                replace(request, spec=without).trace()
