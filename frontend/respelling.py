"""Checkpoints whose tensors have other prefixes than the definition's, or none: all are read in one way, or none."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# What wraps a module adds its own name wherever it stands: torch.compile, FSDP and activation checkpointing of torch.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# In front of all names or of a part of them: of DistributedDataParallel, of models with a head, and of language models
# that are part of another model.
_PREFIXES = frozenset({"module", "model", "transformer", "language_model"}) | _WRAPPERS


@dataclass(frozen=True)
class Respelling:
    """How a checkpoint spells the definition's names: `names` are its own by the definition's, where they differ.

    `parts` are the words that prefixes are made of.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = _PREFIXES

    @staticmethod
    def of(names: Mapping[str, str], optional: str = "") -> "Respelling":
        """`optional` is a prefix of the definition's own that some checkpoints lack."""
        return Respelling(names, _PREFIXES | frozenset(optional.split(".")) - {""})

    def prefix(self, name: str) -> str:
        return _taken_apart(name, self.parts)[0]

    def bare(self, name: str) -> str:
        """The name without its prefix and without wrappers."""
        return _taken_apart(name, self.parts)[1]

    def spelled(self, stored: str) -> set[str]:
        """What rules may know a tensor of the checkpoint by: its name, and that with each prefix of ours."""
        return {stored, *(prefix + self.bare(stored) for prefix in ("", *map(self.prefix, self.names)) if self.names)}

    def __str__(self) -> str:
        """What is done to the checkpoint's names."""
        pairs = dict.fromkeys(
            _without_ends(self.prefix(ours), self.prefix(theirs)) for ours, theirs in self.names.items()
        )
        inner = {part for name in self.names.values() for part in name.removeprefix(self.prefix(name)).split(".")}
        pairs |= dict.fromkeys(("", f"{part}.") for part in sorted(inner & _WRAPPERS))
        return ", ".join(
            f"'{theirs}' is left out" if not ours else f"'{ours}' is added" if not theirs else f"'{theirs}' is '{ours}'"
            for ours, theirs in pairs
            if ours != theirs
        )


def find_respelling(needed: Collection[str], stored: Collection[str], optional: str = "") -> Respelling:
    """How the checkpoint's names `stored` spell those that are `needed`; empty where they are the same, or do not fit.

    A tensor is found by its name without prefix and wrappers. Nothing is respelled where a needed tensor is not found,
    where two may be meant, or where those with one prefix in the definition have several in the checkpoint.
    """
    if set(needed) <= set(stored):
        return Respelling()
    found = _found(needed, stored, Respelling.of({}, optional))
    return Respelling.of(_differing(found), optional) if found.keys() == set(needed) else Respelling()


def nearest_respelling(needed: Collection[str], stored: Collection[str], optional: str = "") -> str:
    """What to say of names that do not fit: the respelling with which more of them do; "" where there is none."""
    found = _found(needed, stored, Respelling.of({}, optional))
    without = len(set(needed) & set(stored))
    if len(found) <= without:
        return ""
    nearest = Respelling.of(_differing(found), optional)
    return f"where {nearest}, {len(found)} of {len(set(needed))} tensors are found, and {without} else"


def _differing(found: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def _found(needed: Collection[str], stored: Collection[str], spelling: Respelling) -> dict[str, str]:
    """The checkpoint's name of each needed tensor that it has, all with one prefix of the definition under the prefix
    that most of them have there."""
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
    """Two prefixes without the parts that they begin or end with alike."""
    left, right = ([part for part in prefix.split(".") if part] for prefix in (ours, theirs))
    for place in (-1, 0):
        while left and right and left[place] == right[place]:
            del left[place], right[place]
    return "".join(f"{part}." for part in left), "".join(f"{part}." for part in right)


def _taken_apart(name: str, parts: frozenset[str]) -> tuple[str, str]:
    """The prefix, which ends in a dot or is empty, and the name after it without the names of wrappers."""
    items = name.split(".")
    begin = 0
    while begin < len(items) - 1 and items[begin] in parts:
        begin += 1
    rest = ".".join(item for item in items[begin:] if item not in _WRAPPERS)
    return "".join(f"{item}." for item in items[:begin]), rest
