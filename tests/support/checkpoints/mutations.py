"""Mutations of a decoder's specs: what each alters, and where it must show."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from specs import S, changed, specs

from ingot.models.blocks.decoder import DecoderSpec

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


def always(dims: DecoderSpec) -> bool:
    return True


def every(kind: type[Any], /, **changes: Any) -> Change:
    """Other values for fields of every spec of a kind."""
    return lambda dims: changed(dims, kind, lambda spec: replace(spec, **changes))


def each(kind: type[S], change: Callable[[S], S]) -> Change:
    return lambda dims: changed(dims, kind, change)


def some(kind: type[S], test: Callable[[S], Any]) -> Callable[[DecoderSpec], bool]:
    """A checkpoint has such a spec."""
    return lambda dims: any(map(test, specs(dims, kind)))


def without(kind: type[Any], field: str, value: Any) -> Mutation:
    return Mutation(
        f"{kind.__name__}.{field} {value}",
        f"{kind.__name__}.{field}",
        some(kind, lambda spec: getattr(spec, field) != value),
        every(kind, **{field: value}),
    )
