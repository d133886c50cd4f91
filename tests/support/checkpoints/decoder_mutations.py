"""Mutations of the specs that most families have, and which of their fields need none."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from families import of_all_files
from mutations import Change, Mutation, Params, always, each, every, some, without
from specs import specs

from ingot.models.blocks.attention import AttentionNames, AttentionSpec, QKNormSpec
from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec, PlainNames, PlainSpec
from ingot.models.blocks.head import HeadSpec
from ingot.models.blocks.layer import BranchSpec, LayerSpec
from ingot.models.blocks.norm import NormSpec
from ingot.models.blocks.positions import RotarySpec
from ingot.models.config import RopeSpec


def _rotated(dims: DecoderSpec) -> bool:
    return bool(dims.ropes)


def _rebased(dims: DecoderSpec) -> bool:
    return any(rope.theta != 10000.0 for rope in dims.ropes)


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
        more = (first_attention(dims).head_dim - rope.rotary_dim) // 2
        constants = ((key, (*old, *old[-1:] * more) if isinstance(old, tuple) else old) for key, old in rope.constants)
        return replace(rope, rotary_dim=first_attention(dims).head_dim, constants=tuple(constants))

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
    attention = first_attention(dims)
    order = torch.arange(attention.heads).view(-1, attention.kv_heads).T.flatten()
    split, mixed = (attention.heads, attention.head_dim), (attention.heads, attention.value_width)
    for name in [name for name in params if name.endswith((".q.weight", ".q.bias"))]:
        params[name] = params[name].unflatten(0, split)[order].flatten(0, 1)
    for name in [name for name in params if name.endswith(".o.weight")]:
        params[name] = params[name].unflatten(1, mixed)[:, order].flatten(1, 2)
    for name in [name for name in params if name.endswith("q_norm.weight")]:
        if attention.qk_norm is not None and attention.qk_norm.over == "all heads":
            params[name] = params[name].unflatten(0, split)[order].flatten(0, 1)
        elif params[name].dim() == 2:
            params[name] = params[name][order]


def first_attention(dims: DecoderSpec) -> AttentionSpec:
    return next(specs(dims, AttentionSpec))


def _grouped(dims: DecoderSpec) -> bool:
    """With one head of k, both orders are the same."""
    return any(
        1 < attention.kv_heads < attention.heads for attention in itertools.islice(specs(dims, AttentionSpec), 1)
    )


def _window_everywhere(dims: DecoderSpec) -> DecoderSpec:
    window = next(attention.window for attention in specs(dims, AttentionSpec) if attention.window)
    return every(AttentionSpec, window=window)(dims)


def _rotated_everywhere(dims: DecoderSpec) -> DecoderSpec:
    rotary = next(specs(dims, RotarySpec))
    return every(AttentionSpec, rotary=rotary)(dims)


def _scale_from_hidden(dims: DecoderSpec) -> DecoderSpec:
    return every(AttentionSpec, scale=(dims.hidden // first_attention(dims).heads) ** -0.5)(dims)


_WINDOWED = some(AttentionSpec, lambda attention: attention.window)
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
    (GatedSpec, "down_bias", False),
    (GatedSpec, "activation", "silu"),
    (EmbeddingSpec, "scale", None),
    (HeadSpec, "bias", False),
    (HeadSpec, "normed", False),
    (HeadSpec, "scale", None),
    (HeadSpec, "soft_cap", None),
)


MUTATIONS = (
    *(without(*one) for one in WITHOUT),
    Mutation("last layer left out", "DecoderSpec.layers", always, lambda dims: replace(dims, layers=dims.layers[:-1])),
    # A layer norm's gains of q and k have a shape of their own.
    Mutation(
        "rms norm",
        "NormSpec.kind",
        lambda dims: (
            some(NormSpec, lambda norm: norm.kind == "layer")(dims)
            and not some(AttentionSpec, lambda one: one.qk_norm)(dims)
        ),
        every(NormSpec, kind="rms", bias=False),
    ),
    Mutation("head tied", "HeadSpec.tied", lambda dims: not dims.head.tied, every(HeadSpec, tied=True)),
    Mutation(
        "epsilon 1e-6",
        "NormSpec.eps",
        always,
        every(NormSpec, eps=1e-6),
        unless=("opt-after", "olmo-plain"),  # no field tells their epsilon, which vanishes beside their activations
    ),
    Mutation(
        "norms only behind",
        "BranchSpec.norm",
        some(BranchSpec, lambda branch: branch.norm and branch.post_norm),
        every(BranchSpec, norm=None),
    ),
    Mutation(
        "norms only in front",
        "BranchSpec.post_norm",
        some(BranchSpec, lambda branch: branch.post_norm),
        each(BranchSpec, lambda branch: replace(branch, norm=branch.norm or branch.post_norm, post_norm=None)),
    ),
    Mutation(
        "norms also in front",
        "BranchSpec.norm",
        some(BranchSpec, lambda branch: branch.post_norm and not branch.norm),
        each(BranchSpec, lambda branch: replace(branch, norm=branch.norm or branch.post_norm)),
    ),
    Mutation(
        "exact gelu, plain",
        "PlainSpec.activation",
        some(PlainSpec, lambda mlp: mlp.activation == "gelu_tanh"),
        every(PlainSpec, activation="gelu"),
        moved=2 * 1e-4,  # the two differ by 5e-4 at most
    ),
    *(
        Mutation(
            f"one norm for q and k, that of {name}",
            f"QKNormSpec.{other}",
            some(QKNormSpec, lambda norms: norms.over == "head" and norms.q != norms.k),
            each(QKNormSpec, lambda norms, name=name, other=other: replace(norms, **{other: getattr(norms, name)})),
            unless=("gemma3n_text-shared", "gemma3n-parts"),  # layers that share a cache have no norm of k
        )
        for name, other in ("qk", "kq")
    ),
    Mutation(
        "exact gelu",
        "GatedSpec.activation",
        some(GatedSpec, lambda mlp: mlp.activation == "gelu_tanh"),
        every(GatedSpec, activation="gelu"),
        moved=10 * 1e-4,  # the two differ by 5e-4 at most
    ),
    Mutation(
        "scale from hidden / heads",
        "AttentionSpec.head_dim",
        lambda dims: (
            some(AttentionSpec, always)(dims)
            and first_attention(dims).scale is None
            and first_attention(dims).head_dim != dims.hidden // first_attention(dims).heads
        ),
        _scale_from_hidden,
    ),
    Mutation(
        "heads grouped by turns",
        "AttentionSpec.kv_heads",
        _grouped,
        params=_grouped_by_turns,
    ),
    Mutation("no window", "AttentionSpec.window", _WINDOWED, every(AttentionSpec, window=None)),
    Mutation(
        "a window one shorter",
        "AttentionSpec.window",
        _WINDOWED,
        each(AttentionSpec, lambda one: replace(one, window=one.window and one.window - 1)),
    ),
    Mutation(
        "a window everywhere",
        "AttentionSpec.window",
        lambda dims: _WINDOWED(dims) and some(AttentionSpec, lambda one: not one.window)(dims),
        _window_everywhere,
    ),
    Mutation(
        "every layer rotated",
        "AttentionSpec.rotary",
        lambda dims: _rotated(dims) and some(AttentionSpec, lambda attention: attention.rotary is None)(dims),
        _rotated_everywhere,
    ),
    Mutation(
        "every layer rotated by the first table",
        "RotarySpec.table",
        some(RotarySpec, lambda rotary: rotary.table),
        every(RotarySpec, table=0),
    ),
    Mutation("no rotation", "DecoderSpec.ropes", _rotated, params=_without_rotation),
    Mutation(
        "other pairs rotated",
        "RotarySpec.interleaved",
        _rotated,
        each(RotarySpec, lambda rotary: replace(rotary, interleaved=not rotary.interleaved)),
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
        lambda dims: (
            some(AttentionSpec, always)(dims)
            and any(rope.rotary_dim < first_attention(dims).head_dim for rope in dims.ropes)
        ),
        _all_rotated,
    ),
    Mutation("theta 10000", "RopeSpec.theta", _rebased, _ropes(lambda rope: replace(rope, theta=10000.0))),
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
            ("original_max_position", 8192.0, ("llama-dynamic", "phi3-short", "phimoe-long")),
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
        unless=("phi3-long", "minicpm-long"),
    ),
    *(
        Mutation(f"{name} 1", f"RopeSpec.constants.{name}", _has(name), _ones(name), unless=others)
        for name, others in (
            ("short_factor", ("phi3-long", "minicpm-long")),
            ("long_factor", ("phi3-short", "phimoe-long")),
        )
    ),
    *of_all_files("MUTATIONS"),
)
# What no checkpoint fits when it is wrong: reading refuses, before any number is wrong.
SIZES: dict[str, Change] = {
    "DecoderSpec.hidden": lambda dims: replace(dims, hidden=2 * dims.hidden),
    "DecoderSpec.vocab": lambda dims: replace(dims, vocab=2 * dims.vocab),
    "AttentionSpec.heads": each(AttentionSpec, lambda one: replace(one, heads=2 * one.heads)),
    "PlainSpec.width": each(PlainSpec, lambda one: replace(one, width=2 * one.width)),
    "GatedSpec.width": each(GatedSpec, lambda one: replace(one, width=2 * one.width)),
    "QKNormSpec.over": each(
        QKNormSpec,
        lambda norms: replace(norms, over="all heads", after_rotation=False) if norms.q.gains else norms,
    ),
    **dict(of_all_files("SIZES")),
}
STORAGE = (
    *("AttentionSpec.names", "GatedSpec.names", "NormSpec.stored", "EmbeddingSpec.stored", "HeadSpec.stored"),
    *("DecoderSpec.names", "BranchSpec.name", "PlainSpec.names"),
    *of_all_files("STORAGE"),
)
# What float32 does not show; test_rounding.py does.
ROUNDING = ("NormSpec.wide", "EmbeddingSpec.rounded", *of_all_files("ROUNDING"))
# What is a spec, whose fields have mutations.
PARTS = ("DecoderSpec.norm", "DecoderSpec.head", "LayerSpec.branches", "BranchSpec.block", *of_all_files("PARTS"))
# Specs of storage alone.
NAMES = (AttentionNames, DecoderNames, GatedNames, PlainNames, *of_all_files("NAMES"))
