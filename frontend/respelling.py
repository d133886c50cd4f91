"""Match the tensor names of a model definition with those of a checkpoint whose names have other prefixes, or none.

Either one rule respells all names, or no name is respelled.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# Wrappers of modules add their names anywhere: torch.compile, FSDP and torch's activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Words that prefixes of tensor names consist of. They come from DistributedDataParallel, from models with a head, and
# from language models that are part of another model.
_PREFIXES = frozenset({"module", "model", "transformer", "language_model"}) | _WRAPPERS


@dataclass(frozen=True)
class Respelling:
    """The mapping from a definition's tensor names to the checkpoint's, which may have other prefixes.

    names   the checkpoint's name by the definition's name, for names that differ
    parts   the words that prefixes consist of, such as `model`
    """

    names: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = _PREFIXES

    @staticmethod
    def of(names: Mapping[str, str], optional: str = "") -> "Respelling":
        """Make a respelling from a mapping of the definition's names to the checkpoint's. `optional` is a prefix of the
        definition that some checkpoints lack."""
        return Respelling(names, _PREFIXES | frozenset(optional.split(".")) - {""})

    def prefix(self, name: str) -> str:
        return _split_prefix(name, self.parts)[0]

    def bare(self, name: str) -> str:
        """Return a tensor name without its prefix, and without the names that wrappers such as torch.compile add."""
        return _split_prefix(name, self.parts)[1]

    def spelled(self, stored: str) -> set[str]:
        """Return the names under which a definition's rules may match the checkpoint tensor `stored`. They are its own
        name, and its bare name with each of the definition's prefixes."""
        return {stored, *(prefix + self.bare(stored) for prefix in ("", *map(self.prefix, self.names)) if self.names)}

    def __str__(self) -> str:
        """Describe how the checkpoint's names differ from the definition's, for messages."""
        pairs = dict.fromkeys(
            _without_ends(self.prefix(ours), self.prefix(theirs)) for ours, theirs in self.names.items()
        )
        inner = {part for name in self.names.values() for part in name.removeprefix(self.prefix(name)).split(".")}
        pairs |= dict.fromkeys(("", f"{part}.") for part in sorted(inner & _WRAPPERS))
        return ", ".join(
            f"'{theirs}' is omitted" if not ours else f"'{ours}' is added" if not theirs else f"'{theirs}' is '{ours}'"
            for ours, theirs in pairs
            if ours != theirs
        )


def find_respelling(needed: Collection[str], stored: Collection[str], optional: str = "") -> Respelling:
    """Return how to respell the definition's names, `needed`, as the checkpoint's names, `stored`. It is empty if they
    are equal or cannot be matched.

    Tensors are matched by their names without prefix and wrappers. Nothing is respelled if a needed tensor is missing
    or ambiguous, or if the checkpoint has several prefixes for one prefix of the definition. `optional` is a prefix of
    the definition that some checkpoints lack.
    """
    if set(needed) <= set(stored):
        return Respelling()
    found = _found(needed, stored, Respelling.of({}, optional))
    return Respelling.of(_differing(found), optional) if found.keys() == set(needed) else Respelling()


def nearest_respelling(needed: Collection[str], stored: Collection[str], optional: str = "") -> str:
    """Return a hint for names that do not fit: the respelling that would match more of the `needed` names. Empty if
    none would."""
    found = _found(needed, stored, Respelling.of({}, optional))
    without = len(set(needed) & set(stored))
    if len(found) <= without:
        return ""
    nearest = Respelling.of(_differing(found), optional)
    return f"if {nearest}, {len(found)} of {len(set(needed))} tensors are found, otherwise {without}"


def _differing(found: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def _found(needed: Collection[str], stored: Collection[str], spelling: Respelling) -> dict[str, str]:
    """Return the checkpoint's name of each needed tensor that has the same name without prefix and wrappers. For each
    prefix of the definition, keep only the tensors with the checkpoint's most frequent prefix."""
    theirs: dict[str, list[str]] = defaultdict(list)
    for name in stored:
        theirs[spelling.bare(name)].append(name)
    ours = Counter(map(spelling.bare, needed))
    pairs = {
        name: theirs[rest][0]
        for name in sorted(needed)
        if ours[rest := spelling.bare(name)] == 1 and len(theirs.get(rest, ())) == 1
    }
    used: dict[str, Counter[str]] = defaultdict(Counter)
    for name, other in pairs.items():
        used[spelling.prefix(name)][spelling.prefix(other)] += 1
    usual = {prefix: counts.most_common(1)[0][0] for prefix, counts in used.items()}
    return {name: other for name, other in pairs.items() if usual[spelling.prefix(name)] == spelling.prefix(other)}


def _without_ends(ours: str, theirs: str) -> tuple[str, str]:
    """Return two prefixes, the definition's and the checkpoint's, without the words that both begin or end with."""
    left, right = ([part for part in prefix.split(".") if part] for prefix in (ours, theirs))
    for place in (-1, 0):
        while left and right and left[place] == right[place]:
            del left[place], right[place]
    return "".join(f"{part}." for part in left), "".join(f"{part}." for part in right)


def _split_prefix(name: str, parts: frozenset[str]) -> tuple[str, str]:
    """Return the prefix of a tensor name, which ends in a dot or is empty, and the rest of the name without wrapper
    names. `parts` are the words that a prefix consists of."""
    items = name.split(".")
    begin = 0
    while begin < len(items) - 1 and items[begin] in parts:
        begin += 1
    rest = ".".join(item for item in items[begin:] if item not in _WRAPPERS)
    return "".join(f"{item}." for item in items[:begin]), rest
