"""Compare two identity documents, the JSON data that a request key or executable key is the digest of.

The result lists the fields that differ, and which differences only follow from others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ingot.backends.table import BACKENDS

Document = Mapping[str, Any]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHOWN = 100  # characters of a value

# Causes come before the fields that they determine.
_SECTIONS = (
    "schema_version",
    "options",
    "config",
    "checkpoint",
    "tokenizer",
    "calibration",
    "pipeline",
    "sources",
    "skipped_fusions",
    "target",
    "toolchain",
    "programs",
)
_FILES = ("checkpoint", "tokenizer")  # digests of chunks, by file
# Options that a definition is traced with, and fields of config.json that determine the context length.
_TRACED_WITH = ("options.dtype", "options.max_seq_len", "options.max_batch", "options.max_tokens")
_LENGTH_FIELDS = (
    "config.max_position_embeddings",
    "config.original_max_position_embeddings",
    "config.rope_parameters",
    "config.rope_scaling",
)


@dataclass(frozen=True)
class Change:
    """A field that differs between two identity documents. The digest of such a JSON document is a key of the compile
    cache.

    `path` is the dotted path of the field, such as "options.dtype". `before` and `after` are its values in the two
    documents. A value is ABSENT if the document lacks the field. The value of a file is a list of digests. `follows` is
    the path of another change that caused this one, "" if there is none.
    """

    path: str
    before: Any
    after: Any
    follows: str = ""

    def __str__(self) -> str:
        if self.before is ABSENT or self.after is ABSENT:
            value, there = (self.after, "B") if self.before is ABSENT else (self.before, "A")
            shown = "" if _is_digest(value) or value == {} else f": {_shown(value)}"
            return f"{self.path}{shown} (only in {there})"
        if _is_digest(self.before) and _is_digest(self.after):
            return self.path
        return f"{self.path}: {_shown(self.before)} -> {_shown(self.after)}"

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in (("a", self.before), ("b", self.after)) if value is not ABSENT}
        return {"path": self.path, **values, **({"follows": self.follows} if self.follows else {})}


def _is_digest(value: Any) -> bool:
    """Return whether a value is a digest or a list of digests. Messages do not show digests."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in values)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        text = " ".join(f"({_shown(one)})" if isinstance(one, list) else str(one) for one in value) or "nothing"
    elif isinstance(value, dict):
        text = " ".join(f"{name}={_shown(one)}" for name, one in sorted(value.items()))
    else:
        text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def changes(a: Document, b: Document) -> list[Change]:
    """Return the fields in which two identity documents differ, causes before effects.

    The digest of such a JSON document is a key of the compile cache. An effect has the path of its cause in `follows`.
    """
    sections = [*_SECTIONS, *sorted((a.keys() | b.keys()) - set(_SECTIONS))]
    found = [change for name in sections for change in _section(name, a.get(name, ABSENT), b.get(name, ABSENT))]
    cause = {
        change.path: next((one.path for one in found if one is not change and _follows(change, one, found)), "")
        for change in found
    }
    return [replace(change, follows=_first(change.path, cause)) for change in found]


def _first(path: str, cause: Mapping[str, str]) -> str:
    """Return the path of the first cause of the change `path`; "" if nothing caused it.

    `cause` maps the path of each change to the path of its direct cause, or to "". The causes are followed back to the
    first one.
    """
    first = cause[path]
    while first and cause[first]:
        first = cause[first]
    return first


def _section(name: str, a: Any, b: Any) -> Iterator[Change]:
    if name in (*_FILES, "sources") and isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _files(name, a, b)
    else:
        yield from _fields(name, a, b)


def _fields(path: str, a: Any, b: Any) -> Iterator[Change]:
    """Yield the changes between two JSON values. `path` is the path of these values.

    Objects are compared field by field. Lists in config.json are compared item by item. All other values are compared
    as a whole.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted(a.keys() | b.keys()):
            yield from _fields(f"{path}.{key}", a.get(key, ABSENT), b.get(key, ABSENT))
    elif path.startswith("config.") and isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (mine, theirs) in enumerate(zip(a, b, strict=True)):  # one for each layer
            yield from _fields(f"{path}[{index}]", mine, theirs)
    elif a != b or type(a) is not type(b):  # True equals 1
        yield Change(path, a, b)


def _files(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    gone = {name: a[name] for name in a if name not in b}
    new = {name: b[name] for name in b if name not in a}
    for name, digests in gone.items():
        renamed = next((other for other, its in new.items() if its == digests), None)
        if renamed is None:
            yield Change(f"{section}.{name}", digests, ABSENT)
        else:
            del new[renamed]
            yield Change(f"{section}.{name}", name, renamed)
    for name, digests in new.items():
        yield Change(f"{section}.{name}", ABSENT, digests)
    for name in a:
        if name in b and a[name] != b[name]:
            yield Change(f"{section}.{name}{_chunks(a[name], b[name])}", a[name], b[name])


def _chunks(a: Any, b: Any) -> str:
    """Return text that names the differing chunks of two versions of a file, such as " chunks 0, 2-4".

    `a` and `b` are lists of the chunks' digests. The text is "" if the file is a single chunk.
    """
    if not isinstance(a, list) or not isinstance(b, list) or max(len(a), len(b)) < 2:
        return ""
    differing = [index for index in range(max(len(a), len(b))) if a[index : index + 1] != b[index : index + 1]]
    runs: list[list[int]] = []
    for index in differing:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f" chunk {text}" if len(differing) == 1 else f" chunks {text}"


def _follows(change: Change, cause: Change, found: Sequence[Change]) -> bool:
    """Return whether `change` is only an effect of `cause`. For example, another config leads to other programs.

    `found` lists all changes in order, including these two.
    """
    path, section = change.path, change.path.partition(".")[0]
    values = (change.before, change.after) == (cause.before, cause.after)
    if path == "options.dtype":
        return cause.path in ("config.dtype", "config.torch_dtype") and change.after == cause.after
    if path.startswith("options.quantize_"):
        return cause.path == "options.quantize" and None in (cause.before, cause.after)
    if path == "options.backends" and cause.path.startswith("options.mesh"):
        return _without_collectives(change.before) == _without_collectives(change.after)
    if path == "options.max_seq_len":
        return cause.path.startswith(_LENGTH_FIELDS)
    if section == "sources" and path.startswith("sources.quantizing/"):
        return cause.path == "calibration" and ABSENT in (change.before, change.after)
    if section == "pipeline":
        return _pipeline_follows(change, cause)
    if section == "toolchain":
        tool = path.removeprefix("toolchain.").partition(".")[2]
        if cause.path == "options.backends":
            return change.before is ABSENT or change.after is ABSENT
        if cause.path == f"target.versions.{tool}":
            return True
        # One compiler serves several backends.
        same_tool = cause.path.startswith("toolchain.") and cause.path.endswith(f".{tool}")
        return bool(tool) and same_tool and values and found.index(cause) < found.index(change)
    if section == "skipped_fusions":
        return cause.path.startswith(
            ("checkpoint.", "config.", "options.dtype", "options.keep_risky_fusions", "pipeline.", "sources.rounding/")
        )
    if section == "programs":
        return cause.path.startswith(("config.", "checkpoint.", "sources.ir/")) or cause.path in (
            *_TRACED_WITH,
            "target.versions.torch",
        )
    return False


def _without_collectives(backends: Any) -> list[Any]:
    """Return the names of backends without those that a mesh adds."""
    own = (BACKENDS.get(name) for name in backends or ())
    added = [one is not None and (one.collectives is not None or one.joins_collectives) for one in own]
    return [name for name, is_added in zip(backends or (), added, strict=True) if not is_added]


def _pipeline_follows(change: Change, cause: Change) -> bool:
    one_sided = change.before is ABSENT or change.after is ABSENT
    if change.path == "pipeline.order":
        added = cause.before is ABSENT or cause.after is ABSENT
        return cause.path.startswith("options.mesh") or (added and _is_pass(cause.path))
    name = change.path.split(".")[1]
    if name == "quantize" and cause.path.startswith("options.quantize"):
        return True
    if cause.path.startswith("options.mesh"):
        return one_sided and _is_pass(change.path)
    # The changed source of the pass has other options than before.
    return one_sided and change.path.count(".") == 2 and cause.path == f"sources.passes/{name.replace('-', '_')}.py"


def _is_pass(path: str) -> bool:
    """Return whether a path names a whole pass, such as "pipeline.cse". The path of an option of a pass is longer."""
    return path.startswith("pipeline.") and path.count(".") == 1 and path != "pipeline.order"
