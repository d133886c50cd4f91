"""Find the checkpoint tensors whose linears an adapter changes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ingot.ir.adapters.folder import Adapter, Factors
from ingot.ir.errors import AdapterError

_WEIGHT = ".weight"


def match_modules(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Factors]:
    """Return the factors of each checkpoint tensor that the adapter changes, by the tensor's name.

    `shapes` has the shapes of the weights of all linears in the checkpoint, by name. A module's name may have more or
    fewer leading words than the tensor's, as in "transformer.h.0.attn.c_attn" and "h.0.attn.c_attn.weight". Raises
    AdapterError if a module is none of these linears, or if the shapes of its factors differ.
    """
    by_end = _by_end(shapes)
    found: dict[str, Factors] = {}
    for module, factors in adapter.modules.items():
        name = _match(module, shapes, by_end)
        if name is None:
            raise AdapterError(
                f"the adapter changes {module:.120}, which the model does not compute as a linear",
                where=str(adapter.folder),
                expected=f"linears of the model, such as {', '.join(_examples(shapes))}",
                hint="use the base model that the adapter was trained with",
            )
        if name in found:
            raise AdapterError(f"two modules of the adapter change {name}", where=f"{adapter.folder}, {module:.120}")
        made = (factors.b.shape[0], factors.a.shape[1])
        needed = shapes[name][::-1] if adapter.transposed else shapes[name]
        if made != needed:
            raise AdapterError(
                f"the factors of {module:.120} make a matrix {list(made)}",
                where=str(adapter.folder),
                expected=f"{list(needed)}, the shape of {name} in the base model"
                + (", which is stored transposed" if adapter.transposed else ""),
                hint="use the base model that the adapter was trained with",
            )
        found[name] = factors
    return found


def _by_end(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[_end(name.removesuffix(_WEIGHT))].append(name)
    return found


def _match(module: str, shapes: Mapping[str, object], by_end: Mapping[str, list[str]]) -> str | None:
    if module + _WEIGHT in shapes:
        return module + _WEIGHT
    others = by_end.get(_end(module), [])
    if len(others) != 1:
        return None
    ours, theirs = module.split("."), others[0].removesuffix(_WEIGHT).split(".")
    # Both may belong to different parts of a checkpoint, such as a text and an image model, unless one name ends in the
    # other or their leading words are the same in another order ("model.language_model", "language_model.model").
    least = min(len(ours), len(theirs))
    same = ours[-least:] == theirs[-least:] or sorted(ours) == sorted(theirs)
    return others[0] if same else None


def _end(name: str) -> str:
    """Return the part of a name from the layer's list on, such as "layers.0.self_attn.q_proj"; else its last word."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdecimal():
            return ".".join(words[max(place - 1, 0) :])
    return words[-1]


def _examples(shapes: Mapping[str, object]) -> list[str]:
    return [name.removesuffix(_WEIGHT) for name in list(shapes)[:3]]
