"""Checkpoints with other name prefixes than the definition, or none. Either one rule respells all names, or no name
is respelled."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# Wrappers of modules add their names anywhere: torch.compile, FSDP and torch's activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Prefixes of all names or of some: from DistributedDataParallel, from models with a head, and from language models that
# are part of another model.
_PREFIXES = frozenset({"module", "model", "transformer", "language_model"}) | _WRAPPERS


@dataclass(frozen=True)
class Respelling:
    """The mapping from the definition's tensor names to the checkpoint's.

    names   the checkpoint's name by the definition's name, if they differ
    parts   the words that prefixes consist of
    """

    names: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = _PREFIXES

    @staticmethod
    def of(names: Mapping[str, str], optional: str = "") -> "Respelling":
        """Return a respelling. `optional` is a prefix of the definition that some checkpoints lack."""
        return Respelling(names, _PREFIXES | frozenset(optional.split(".")) - {""})

    def prefix(self, name: str) -> str:
        return _taken_apart(name, self.parts)[0]

    def bare(self, name: str) -> str:
        """Return the name without its prefix and without wrappers."""
        return _taken_apart(name, self.parts)[1]

    def spelled(self, stored: str) -> set[str]:
        """Return the names under which rules may match a checkpoint tensor: its name, and its bare name with each of
        the definition's prefixes."""
        return {stored, *(prefix + self.bare(stored) for prefix in ("", *map(self.prefix, self.names)) if self.names)}

    def __str__(self) -> str:
        """Return a description of the changes to the checkpoint's names."""
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
    """Return the respelling from the `needed` names to the checkpoint's `stored` names; empty if they are equal or do
    not fit.

    Tensors are matched by their names without prefix and wrappers. Nothing is respelled if a needed tensor is missing
    or ambiguous, or if the checkpoint has several prefixes for one prefix of the definition.
    """
    if set(needed) <= set(stored):
        return Respelling()
    found = _found(needed, stored, Respelling.of({}, optional))
    return Respelling.of(_differing(found), optional) if found.keys() == set(needed) else Respelling()


def nearest_respelling(needed: Collection[str], stored: Collection[str], optional: str = "") -> str:
    """Return the hint for names that do not fit: the respelling that matches more of them; "" if there is none."""
    found = _found(needed, stored, Respelling.of({}, optional))
    without = len(set(needed) & set(stored))
    if len(found) <= without:
        return ""
    nearest = Respelling.of(_differing(found), optional)
    return f"if {nearest}, {len(found)} of {len(set(needed))} tensors are found, otherwise {without}"


def _differing(found: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def _found(needed: Collection[str], stored: Collection[str], spelling: Respelling) -> dict[str, str]:
    """Return the checkpoint's name of each needed tensor that it has. For each prefix of the definition, keep only
    tensors with the most frequent prefix in the checkpoint."""
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
    """Return two prefixes without their common first and last parts."""
    left, right = ([part for part in prefix.split(".") if part] for prefix in (ours, theirs))
    for place in (-1, 0):
        while left and right and left[place] == right[place]:
            del left[place], right[place]
    return "".join(f"{part}." for part in left), "".join(f"{part}." for part in right)


def _taken_apart(name: str, parts: frozenset[str]) -> tuple[str, str]:
    """Return the prefix, which ends in a dot or is empty, and the rest of the name without wrapper names."""
    items = name.split(".")
    begin = 0
    while begin < len(items) - 1 and items[begin] in parts:
        begin += 1
    rest = ".".join(item for item in items[begin:] if item not in _WRAPPERS)
    return "".join(f"{item}." for item in items[:begin]), rest
