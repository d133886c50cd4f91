"""Every field of a decoder's specs shows: without it log-probabilities move by 100 times what parity allows.

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
from specs import S, changed, specs
from tiny import TINY

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir.errors import CheckpointError, IngotError
from ingot.ir.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.program import ModelSpec
from ingot.models.architectures import ARCHITECTURES, read_spec
from ingot.models.blocks.attention import AttentionNames, AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec, PlainNames, PlainSpec
from ingot.models.blocks.head import HeadSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.learned_positions import LearnedPositionsSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import RopeSpec
from ingot.request import Request

# One worker, for the traces that tests share.
pytestmark = pytest.mark.xdist_group("mutations")

# Which checkpoint is mutated where one is enough: the first one that has what is mutated. The commit draws the order.
ORDER = random.Random(run_seed()).sample([*TINY], len(TINY))
MOVED = 100 * 1e-4  # 100 × the tolerance of test_transformers.py

Params = dict[str, torch.Tensor]
Change = Callable[[DecoderSpec], DecoderSpec]


def _unchanged(dims: DecoderSpec) -> DecoderSpec:
    return dims


def _unchanged_params(params: Params, dims: DecoderSpec) -> None:
    pass


@dataclass(frozen=True)
class Mutation:
    """`field` is what it removes or alters, with the name of the spec; `applies` to which checkpoints, save those that
    `unless` names, where it cannot show. It moves a log-probability by `moved` or more."""

    name: str
    field: str
    applies: Callable[[DecoderSpec], Any]
    spec: Change = _unchanged
    params: Callable[[Params, DecoderSpec], None] = _unchanged_params
    unless: tuple[str, ...] = ()
    moved: float = MOVED


def _rotated(dims: DecoderSpec) -> bool:
    return bool(dims.ropes)


def _always(dims: DecoderSpec) -> bool:
    return True


def _all(kind: type[Any], /, **changes: Any) -> Change:
    """Other values for fields of every spec of a kind."""
    return lambda dims: changed(dims, kind, lambda spec: replace(spec, **changes))


def _each(kind: type[S], change: Callable[[S], S]) -> Change:
    return lambda dims: changed(dims, kind, change)


def _some(kind: type[S], test: Callable[[S], Any]) -> Callable[[DecoderSpec], bool]:
    """A checkpoint has such a spec."""
    return lambda dims: any(map(test, specs(dims, kind)))


def _ropes(change: Callable[[RopeSpec], RopeSpec]) -> Change:
    return lambda dims: replace(dims, ropes=tuple(map(change, dims.ropes)))


def _constant(name: str, value: Any) -> Change:
    def change(rope: RopeSpec) -> RopeSpec:
        return replace(rope, constants=tuple((key, value if key == name else old) for key, old in rope.constants))

    return _ropes(change)


def _has(constant: str, value: Any = None) -> Callable[[DecoderSpec], bool]:
    """Some table has this constant, and not with this value."""
    return lambda dims: any(key == constant and old != value for rope in dims.ropes for key, old in rope.constants)


def _kind(rope_type: str) -> Callable[[DecoderSpec], bool]:
    return lambda dims: any(rope.rope_type == rope_type for rope in dims.ropes)


def _ones(constant: str) -> Change:
    def change(rope: RopeSpec) -> RopeSpec:
        constants = ((key, (1.0,) * len(old) if key == constant else old) for key, old in rope.constants)
        return replace(rope, constants=tuple(constants))

    return _ropes(change)


def _half_rotated(dims: DecoderSpec) -> DecoderSpec:
    return _ropes(lambda rope: replace(rope, rotary_dim=rope.rotary_dim // 4 * 2))(dims)


def _all_rotated(dims: DecoderSpec) -> DecoderSpec:
    def widened(rope: RopeSpec) -> RopeSpec:
        more = (_attention(dims).head_dim - rope.rotary_dim) // 2
        constants = ((key, (*old, *old[-1:] * more) if isinstance(old, tuple) else old) for key, old in rope.constants)
        return replace(rope, rotary_dim=_attention(dims).head_dim, constants=tuple(constants))

    return _ropes(widened)(dims)


def _llama3_for_linear(rope: RopeSpec) -> RopeSpec:
    if rope.rope_type != "llama3":
        return rope
    return replace(rope, rope_type="linear", constants=(("factor", dict(rope.constants)["factor"]),))


def _without_rotation(params: Params, dims: DecoderSpec) -> None:
    for name in [name for name in params if name.startswith("ropes.")]:
        rows, half = params[name].shape[0], params[name].shape[1] // 2
        params[name] = torch.cat([torch.ones(rows, half), torch.zeros(rows, half)], -1)


def _grouped_by_turns(params: Params, dims: DecoderSpec) -> None:
    """Query head i with key-value head i % kv_heads instead of i // group: the same heads in another order."""
    attention = _attention(dims)
    order = torch.arange(attention.heads).view(-1, attention.kv_heads).T.flatten()
    split = (attention.heads, attention.head_dim)
    for name in [name for name in params if name.endswith((".q.weight", ".q.bias"))]:
        params[name] = params[name].unflatten(0, split)[order].flatten(0, 1)
    for name in [name for name in params if name.endswith(".o.weight")]:
        params[name] = params[name].unflatten(1, split)[:, order].flatten(1, 2)
    for name in [name for name in params if name.endswith("q_norm.weight")]:
        if attention.qk_norm is not None and attention.qk_norm.over == "all heads":
            params[name] = params[name].unflatten(0, split)[order].flatten(0, 1)
        elif params[name].dim() == 2:
            params[name] = params[name][order]


def _attention(dims: DecoderSpec) -> AttentionSpec:
    return next(specs(dims, AttentionSpec))


def _window_everywhere(dims: DecoderSpec) -> DecoderSpec:
    window = next(attention.window for attention in specs(dims, AttentionSpec) if attention.window)
    return _all(AttentionSpec, window=window)(dims)


def _rotated_everywhere(dims: DecoderSpec) -> DecoderSpec:
    rotary = next(specs(dims, RotarySpec))
    return _all(AttentionSpec, rotary=rotary)(dims)


def _scale_from_hidden(dims: DecoderSpec) -> DecoderSpec:
    return _all(AttentionSpec, scale=(dims.hidden // _attention(dims).heads) ** -0.5)(dims)


_WINDOWED = _some(AttentionSpec, lambda attention: attention.window)
# What a feature's absence is, where it is one value: the checkpoints that have another one.
WITHOUT: tuple[tuple[type[Any], str, Any], ...] = (
    (NormSpec, "offset", 0.0),
    (NormSpec, "bias", False),
    (PlainSpec, "bias", False),
    (LayerSpec, "parallel", False),
    (LayerSpec, "scale", None),
    (AttentionSpec, "qk_norm", None),
    (AttentionSpec, "bias", False),
    (AttentionSpec, "o_bias", False),
    (AttentionSpec, "scale", None),
    (AttentionSpec, "soft_cap", None),
    (GatedSpec, "bias", False),
    (GatedSpec, "activation", "silu"),
    (EmbeddingSpec, "scale", None),
    (HeadSpec, "bias", False),
    (HeadSpec, "scale", None),
    (HeadSpec, "soft_cap", None),
)


def _without(kind: type[Any], field: str, value: Any) -> Mutation:
    return Mutation(
        f"{kind.__name__}.{field} {value}",
        f"{kind.__name__}.{field}",
        _some(kind, lambda spec: getattr(spec, field) != value),
        _all(kind, **{field: value}),
    )


MUTATIONS = (
    *(_without(*one) for one in WITHOUT),
    Mutation("last layer left out", "DecoderSpec.layers", _always, lambda dims: replace(dims, layers=dims.layers[:-1])),
    # A layer norm's gains of q and k have a shape of their own.
    Mutation(
        "rms norm",
        "NormSpec.kind",
        lambda dims: dims.norm.kind == "layer" and _attention(dims).qk_norm is None,
        _all(NormSpec, kind="rms", bias=False),
    ),
    Mutation("head tied", "HeadSpec.tied", lambda dims: not dims.head.tied, _all(HeadSpec, tied=True)),
    Mutation("epsilon 1e-6", "NormSpec.eps", _always, _all(NormSpec, eps=1e-6)),
    Mutation(
        "norms only behind",
        "BranchSpec.norm",
        _some(BranchSpec, lambda branch: branch.norm and branch.post_norm),
        _all(BranchSpec, norm=None),
    ),
    Mutation(
        "norms only in front",
        "BranchSpec.post_norm",
        _some(BranchSpec, lambda branch: branch.post_norm),
        _each(BranchSpec, lambda branch: replace(branch, norm=branch.norm or branch.post_norm, post_norm=None)),
    ),
    Mutation(
        "norms also in front",
        "BranchSpec.norm",
        _some(BranchSpec, lambda branch: branch.post_norm and not branch.norm),
        _each(BranchSpec, lambda branch: replace(branch, norm=branch.norm or branch.post_norm)),
    ),
    Mutation(
        "no learned positions",
        "DecoderSpec.embedding",
        _some(LearnedPositionsSpec, lambda embedding: True),
        _each(DecoderSpec, lambda dims: replace(dims, embedding=EmbeddingSpec(stored="wte"))),
    ),
    Mutation(
        "exact gelu, plain",
        "PlainSpec.activation",
        _some(PlainSpec, lambda mlp: mlp.activation == "gelu_tanh"),
        _all(PlainSpec, activation="gelu"),
        moved=2 * 1e-4,  # the two differ by 5e-4 at most
    ),
    *(
        Mutation(
            f"one norm for q and k, that of {name}",
            f"QKNormSpec.{other}",
            _some(QKNormSpec, lambda norms: norms.over == "head"),
            _each(QKNormSpec, lambda norms, name=name, other=other: replace(norms, **{other: getattr(norms, name)})),
        )
        for name, other in ("qk", "kq")
    ),
    Mutation(
        "exact gelu",
        "GatedSpec.activation",
        _some(GatedSpec, lambda mlp: mlp.activation == "gelu_tanh"),
        _all(GatedSpec, activation="gelu"),
        moved=10 * 1e-4,  # the two differ by 5e-4 at most
    ),
    Mutation(
        "scale from hidden / heads",
        "AttentionSpec.head_dim",
        lambda dims: (
            _attention(dims).scale is None and _attention(dims).head_dim != dims.hidden // _attention(dims).heads
        ),
        _scale_from_hidden,
    ),
    Mutation(
        "heads grouped by turns",
        "AttentionSpec.kv_heads",
        _some(AttentionSpec, lambda attention: attention.kv_heads < attention.heads),
        params=_grouped_by_turns,
    ),
    Mutation("no window", "AttentionSpec.window", _WINDOWED, _all(AttentionSpec, window=None)),
    Mutation(
        "a window one shorter",
        "AttentionSpec.window",
        _WINDOWED,
        _each(AttentionSpec, lambda one: replace(one, window=one.window and one.window - 1)),
    ),
    Mutation(
        "a window everywhere",
        "AttentionSpec.window",
        lambda dims: _WINDOWED(dims) and _some(AttentionSpec, lambda one: not one.window)(dims),
        _window_everywhere,
    ),
    Mutation(
        "every layer rotated",
        "AttentionSpec.rotary",
        lambda dims: _rotated(dims) and _some(AttentionSpec, lambda attention: attention.rotary is None)(dims),
        _rotated_everywhere,
    ),
    Mutation(
        "every layer rotated by the first table",
        "RotarySpec.table",
        _some(RotarySpec, lambda rotary: rotary.table),
        _all(RotarySpec, table=0),
    ),
    Mutation("no rotation", "DecoderSpec.ropes", _rotated, params=_without_rotation),
    Mutation(
        "other pairs rotated",
        "RotarySpec.interleaved",
        _rotated,
        _each(RotarySpec, lambda rotary: replace(rotary, interleaved=not rotary.interleaved)),
    ),
    Mutation(
        "half of it rotated",
        "RopeSpec.rotary_dim",
        lambda dims: _rotated(dims) and not _kind("longrope")(dims),
        _half_rotated,
    ),
    Mutation(
        "the whole head rotated",
        "RopeSpec.rotary_dim",
        lambda dims: any(rope.rotary_dim < _attention(dims).head_dim for rope in dims.ropes),
        _all_rotated,
    ),
    Mutation("theta 10000", "RopeSpec.theta", _rotated, _ropes(lambda rope: replace(rope, theta=10000.0))),
    Mutation(
        "rope default",
        "RopeSpec.rope_type",
        lambda dims: not all(rope.rope_type == "default" for rope in dims.ropes),
        _ropes(lambda rope: replace(rope, rope_type="default", constants=())),
        unless=("llama-dynamic",),  # compiled for the context that needs no stretching
    ),
    Mutation("llama3 taken for linear", "RopeSpec.rope_type", _kind("llama3"), _ropes(_llama3_for_linear)),
    Mutation(
        "no factor", "RopeSpec.constants.factor", _has("factor"), _constant("factor", 1.0), unless=("llama-dynamic",)
    ),
    # Llama 3.1's own, YaRN's defaults, and contexts on the other side of the switch.
    *(
        Mutation(
            f"{name} {value}", f"RopeSpec.constants.{name}", _has(name, value), _constant(name, value), unless=unless
        )
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
        "RopeSpec.constants.original_max_position",
        lambda dims: _kind("dynamic")(dims) or _kind("longrope")(dims),
        _constant("original_max_position", 16.0),
        unless=("phi3-long",),
    ),
    *(
        Mutation(f"{name} 1", f"RopeSpec.constants.{name}", _has(name), _ones(name), unless=(other,))
        for name, other in (("short_factor", "phi3-long"), ("long_factor", "phi3-short"))
    ),
)
# What no checkpoint fits when it is wrong: reading refuses, before any number is wrong.
SIZES: dict[str, Change] = {
    "DecoderSpec.hidden": lambda dims: replace(dims, hidden=2 * dims.hidden),
    "DecoderSpec.vocab": lambda dims: replace(dims, vocab=2 * dims.vocab),
    "AttentionSpec.heads": _each(AttentionSpec, lambda one: replace(one, heads=2 * one.heads)),
    "PlainSpec.width": _each(PlainSpec, lambda one: replace(one, width=2 * one.width)),
    "LearnedPositionsSpec.positions": _each(LearnedPositionsSpec, lambda one: replace(one, positions=7)),
    "GatedSpec.width": _each(GatedSpec, lambda one: replace(one, width=2 * one.width)),
    "QKNormSpec.over": _all(QKNormSpec, over="all heads"),
}
STORAGE = (
    *("AttentionSpec.names", "GatedSpec.names", "NormSpec.stored", "EmbeddingSpec.stored", "HeadSpec.stored"),
    *("DecoderSpec.names", "BranchSpec.name", "PlainSpec.names"),
    *("LearnedPositionsSpec.stored", "LearnedPositionsSpec.stored_positions"),
)
# What float32 does not show; test_rounding.py does.
ROUNDING = ("NormSpec.wide", "EmbeddingSpec.rounded")
# What is a spec, whose fields have mutations.
PARTS = ("DecoderSpec.norm", "DecoderSpec.head", "LayerSpec.branches", "BranchSpec.block")
NAMES = (AttentionNames, DecoderNames, GatedNames, PlainNames)  # specs of storage alone


def _spec(folder: Path) -> ModelSpec:
    return read_spec(json.loads((folder / "config.json").read_text()))


def _logprobs(folder: Path, name: str, mutation: Mutation | None = None) -> list[torch.Tensor]:
    opened = Checkpoint.open(folder)
    spec = read_spec(opened.config)
    if mutation is not None:
        spec = replace(spec, dims=mutation.spec(spec.dims))
    max_seq_len = TINY[name].max_seq_len
    program = trace(spec, Limits(max_seq_len, 8, 1024)).entries["main"]

    params = load_params(program.params, opened.read)
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
    mutated = {mutation.field for mutation in MUTATIONS} | {*SIZES, *STORAGE, *ROUNDING, *PARTS}
    needed = set()
    for name in TINY:
        for spec in specs(_spec(checkpoint(name)).dims):
            if isinstance(spec, RopeSpec):
                needed |= {f"RopeSpec.constants.{constant}" for constant, _ in spec.constants}
            if not isinstance(spec, NAMES):
                needed |= {f"{type(spec).__name__}.{field.name}" for field in fields(spec)}  # type: ignore[arg-type]
    assert needed - {"RopeSpec.constants"} == mutated


def test_every_architecture_has_a_checkpoint() -> None:
    assert {tiny.config["architectures"][0] for tiny in TINY.values()} == ARCHITECTURES.keys()


FLAGS: dict[str, Callable[[DecoderSpec], bool]] = {
    "tied": lambda dims: dims.head.tied,
    "bias": lambda dims: _attention(dims).bias,
    "o_bias": lambda dims: _attention(dims).o_bias,
    "mlp_bias": lambda dims: next(specs(dims, GatedSpec)).bias,
}


def test_every_flag_is_both_on_and_off(checkpoint: Callable[[str], Path]) -> None:
    """Within three checkpoints of the first two families, as far as the family has the flag."""
    for family, flags in (("llama", tuple(FLAGS)), ("qwen3", ("tied", "bias", "o_bias"))):
        found = [_spec(checkpoint(f"{family}-{kind}")).dims for kind in ("plain", "biased", "scaled")]
        for flag in flags:
            assert set(map(FLAGS[flag], found)) == {True, False}, (family, flag)
        assert {_attention(dims).heads // _attention(dims).kv_heads for dims in found} == {1, 2, 3}
        assert {dims.ropes[0].rope_type for dims in found} == {"default", "linear", "llama3"}


def _with_dims(request: Request, change: Change) -> Request:
    return replace(request, spec=replace(request.spec, dims=change(request.spec.dims)))


def test_weights_stored_apart_are_missed(checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint("phi3-short"), backend="reference")
    with pytest.raises(CheckpointError, match="missing"):
        _with_dims(request, _all(AttentionSpec, names=AttentionNames())).trace()


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-plain", "gpt2-learned"])
@pytest.mark.parametrize("size", SIZES)
def test_a_wrong_size_is_refused(name: str, size: str, checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint(name), backend="reference")
    wrong = _with_dims(request, SIZES[size])
    if wrong.spec != request.spec:  # Llama has no norms of q and k
        with pytest.raises(CheckpointError, match="do not fit"):
            wrong.trace()


@pytest.mark.parametrize("name", ["llama-biased", "qwen3-plain"])
def test_a_head_that_is_not_tied_is_missed(name: str, checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint(name), backend="reference")
    with pytest.raises(IngotError, match=r"lm_head\.weight"):
        _with_dims(request, _all(HeadSpec, tied=False)).trace()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (AttentionSpec, "bias", False),
        (AttentionSpec, "o_bias", False),
        (GatedSpec, "bias", False),
        (AttentionSpec, "qk_norm", None),
        (BranchSpec, "post_norm", None),
    ],
)
def test_tensors_of_a_flag_left_out_are_extra(
    kind: type[Any], field: str, value: Any, checkpoint: Callable[[str], Path]
) -> None:
    for name in ("llama-biased", "qwen3-biased", "gemma2-capped"):
        request = Request.read(checkpoint(name), backend="reference")
        without = _with_dims(request, _all(kind, **{field: value}))
        if without.spec != request.spec:
            with pytest.raises(CheckpointError, match="extra"):
                without.trace()
