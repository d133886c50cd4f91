"""What a planted fault is: what is compiled, how the fault gets in, and the truth about it."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot import compile_model

# Active while the faulty artifact is compiled, and again while somebody looks for the fault: a bug does not go away.
Plant = Callable[[], contextlib.AbstractContextManager[None]]
# A change of the finished artifact, for what goes wrong behind the compiler.
Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Setup:
    """What is compiled: a checkpoint by its name in `models.DEEP`, and options of `compile_model`."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([self.model, *(f"{name}={value}" for name, value in self.options.items())])

    def compile(self, checkpoint: Path, output: Path, **more: Any) -> Path:
        compile_model(checkpoint, output, **{**_SIZES, **self.options}, **more)
        return output


# Pages of 16 tokens: some prompts fill several of them.
_SIZES = {"max_seq_len": 160, "max_batch": 8, "max_tokens": 256, "jobs": 1}


@dataclass(frozen=True)
class Truth:
    """Who is to blame. `blamed`, `rewrite` and `nodes` are what a verdict should say in its fields of that name.

    `rewrite` is the anchor of the pass's rewrite, None where no rewrite is at fault. Of `nodes`, any one will do: a
    rewrite that mixes up two values makes both wrong. `what` says in words what was done. An empty `blamed` says that
    the kind is all there is to name. `as_pass` is for what may as well be blamed on the pass of that name.
    """

    kind: str
    blamed: str
    what: str
    nodes: tuple[str, ...]
    rewrite: str | None = None
    bucket: str | None = None
    as_pass: str = ""

    def judge(self, verdict: Mapping[str, Any]) -> "Score":
        """How much of the truth a verdict, as JSON, names."""
        kind, blamed = verdict.get("kind"), verdict.get("blamed")
        named = kind == self.kind and self.blamed in ("", blamed)
        named = named or bool(self.as_pass and (kind, blamed) == ("pass", self.as_pass))
        rewrite = verdict.get("rewrite") or {}
        return Score(
            blamed=named,
            rewrite=named and (self.rewrite is None or rewrite.get("anchor") == self.rewrite),
            node=named and verdict.get("node", "").removeprefix("%") in self.nodes,
        )


@dataclass(frozen=True)
class Score:
    """Whether a verdict names the pass or backend, the rewrite (true where none is at fault), and the node."""

    blamed: bool
    rewrite: bool
    node: bool

    @property
    def exact(self) -> bool:
        return self.blamed and self.rewrite and self.node


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Fault:
    """A fault of the class `name` in what `setup` compiles. `oracle` is what it takes to find it, beside nothing."""

    name: str
    setup: Setup
    truth: Truth
    plant: Plant = field(default=_nothing, repr=False)
    damage: Damage | None = field(default=None, repr=False)
    oracle: str | None = None

    def compile(self, checkpoint: Path, output: Path, **more: Any) -> Path:
        """The faulty artifact."""
        with self.plant():
            self.setup.compile(checkpoint, output, **more)
        if self.damage is not None:
            self.damage(output)
        return output

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "setup": str(self.setup),
            "truth": asdict(self.truth),
            "oracle": self.oracle,
        }


class NoFault(Exception):
    """What was drawn is none: it does not apply here, or nothing that anybody could see changes by it."""


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Any:
    """An attribute, or the item of a mapping, replaced for a while."""
    mapping = isinstance(holder, dict)
    before = holder[name] if mapping else getattr(holder, name)
    put = holder.__setitem__ if mapping else lambda key, new: setattr(holder, key, new)
    put(name, value)
    try:
        yield
    finally:
        put(name, before)


def work_folder() -> Path:
    """Where checkpoints and artifacts of a campaign lie."""
    folder = Path(os.environ.get("INGOT_FAULTS", Path(tempfile.gettempdir()) / "ingot-faults"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
