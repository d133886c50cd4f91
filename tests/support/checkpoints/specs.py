"""The tree of specs that describes a model: what is in it, and another tree with some of them changed."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

S = TypeVar("S")


def specs(tree: Any, kind: type[S] = object) -> Iterator[S]:  # type: ignore[assignment]  # of any kind
    """The specs of a kind in a tree of dataclasses and tuples, from the outermost on."""
    if is_dataclass(tree):
        if isinstance(tree, kind):
            yield tree
        for field in fields(tree):
            yield from specs(getattr(tree, field.name), kind)
    elif isinstance(tree, tuple):
        for one in tree:
            yield from specs(one, kind)


def changed(tree: Any, kind: type[S], change: Callable[[S], S]) -> Any:
    """The tree with `change` of every spec of a kind, from the innermost on."""
    if isinstance(tree, tuple):
        return tuple(changed(one, kind, change) for one in tree)
    if not is_dataclass(tree) or isinstance(tree, type):
        return tree
    tree = replace(tree, **{field.name: changed(getattr(tree, field.name), kind, change) for field in fields(tree)})
    return change(tree) if isinstance(tree, kind) else tree
