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
    """A mapping from the tensor names of a model definition to the names in a checkpoint with other prefixes.

    For example, "model.norm.weight" may be "language_model.model.norm.weight" in the checkpoint.

    names   name in the definition -> name in the checkpoint, for names that differ
    parts   the words that prefixes consist of, such as "model"
    """

    names: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = _PREFIXES

    @staticmethod
    def of(names: Mapping[str, str], optional: str = "") -> "Respelling":
        """Return a Respelling.

        names      name in the definition -> name in the checkpoint, for names that differ
        optional   a prefix that the definition has and some checkpoints omit. Its words are added to `parts`.
        """
        return Respelling(names, _PREFIXES | frozenset(optional.split(".")) - {""})

    def prefix(self, name: str) -> str:
        return _split_prefix(name, self.parts)[0]

    def bare(self, name: str) -> str:
        """Return a tensor name without its prefix, such as "model.".

        Names that wrappers insert are removed too, such as "_orig_mod" of torch.compile.
        """
        return _split_prefix(name, self.parts)[1]

    def spelled(self, stored: str) -> set[str]:
        """Return the names of a checkpoint tensor that rules for ignored tensors are matched with.

        They are its own name `stored` and, if the definition has other prefixes, the name with each of them and with
        none.
        """
        return {stored, *(prefix + self.bare(stored) for prefix in ("", *map(self.prefix, self.names)) if self.names)}

    def __str__(self) -> str:
        """Return how prefixes differ, for messages.

        For example, "'language_model.' is 'model.'" names the checkpoint's prefix and then the definition's.
        """
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
    """Return how a checkpoint spells the tensor names that a model definition needs.

    The result is empty if the checkpoint has all needed names, or if any of them has no match. Two names match if they
    are equal without prefixes. Each prefix of the definition must stand for one prefix of the checkpoint.

    needed     names that the model definition needs
    stored     names in the checkpoint
    optional   a prefix that the definition has and some checkpoints omit
    """
    if set(needed) <= set(stored):
        return Respelling()
    found = _found(needed, stored, Respelling.of({}, optional))
    return Respelling.of(_differing(found), optional) if found.keys() == set(needed) else Respelling()


def nearest_respelling(needed: Collection[str], stored: Collection[str], optional: str = "") -> str:
    """Return a hint for an error about missing tensors: which other prefixes would match more names; "" if none.

    needed     names that the model definition needs
    stored     names in the checkpoint
    optional   a prefix that the definition has and some checkpoints omit
    """
    found = _found(needed, stored, Respelling.of({}, optional))
    without = len(set(needed) & set(stored))
    if len(found) <= without:
        return ""
    nearest = Respelling.of(_differing(found), optional)
    return f"if {nearest}, {len(found)} of {len(set(needed))} tensors are found, otherwise {without}"


def _differing(found: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def _found(needed: Collection[str], stored: Collection[str], spelling: Respelling) -> dict[str, str]:
    """Return the stored name of each needed tensor that has exactly one match, by its needed name.

    Two names match if they are equal without prefixes and wrapper names. For each prefix of needed names, only matches
    with the most frequent stored prefix are kept.
    """
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
    """Return two prefixes without the words that both begin with, and without the words that both end with."""
    left, right = ([part for part in prefix.split(".") if part] for prefix in (ours, theirs))
    for place in (-1, 0):
        while left and right and left[place] == right[place]:
            del left[place], right[place]
    return "".join(f"{part}." for part in left), "".join(f"{part}." for part in right)


def _split_prefix(name: str, parts: frozenset[str]) -> tuple[str, str]:
    """Split a tensor name into its prefix, such as "model.", and the rest. The prefix may be "".

    `parts` are the words that prefixes consist of. Names of wrappers, such as "_orig_mod", are removed from the rest.
    """
    items = name.split(".")
    begin = 0
    while begin < len(items) - 1 and items[begin] in parts:
        begin += 1
    rest = ".".join(item for item in items[begin:] if item not in _WRAPPERS)
    return "".join(f"{item}." for item in items[:begin]), rest
