"""The rewrite engine: patterns that match calls, and an editor that keeps types, source lines and counts right."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ingot.ir import build
from ingot.ir.artifact.record import Refusal, Rewrite
from ingot.ir.infer import infer
from ingot.ir.ops import Op
from ingot.ir.program import ParamSpec, Program, target_name


@dataclass(frozen=True)
class Var:
    """A variable in a pattern. It matches any value.

    All variables of one name in a pattern must match the same value.
    """

    name: str


class Pattern:
    """A pattern for calls of the op or function `target`.

    Each argument is a pattern, a variable (`Var`) or a constant.
    """

    def __init__(self, target: Any, *args: Any, **kwargs: Any) -> None:
        self.target = target.overload if isinstance(target, Op) else target
        self.args, self.kwargs = args, kwargs

    def match(self, node: Any) -> dict[str, Any] | None:
        """Return the values of the pattern's variables, by name, if it matches at `node`; else None.

        The item "calls" is the list of all matched calls.
        """
        bound: dict[str, Any] = {"calls": []}
        return bound if self._match(node, bound) else None

    def _match(self, node: Any, bound: dict[str, Any]) -> bool:
        if not isinstance(node, fx.Node) or node.op != "call_function" or node.target != self.target:
            return False
        if len(node.args) != len(self.args) or node.kwargs.keys() != self.kwargs.keys():
            return False
        bound["calls"].append(node)
        pairs = [*zip(self.args, node.args, strict=True), *((p, node.kwargs[k]) for k, p in self.kwargs.items())]
        return all(_match_argument(pattern, value, bound) for pattern, value in pairs)


def _match_argument(pattern: Any, value: Any, bound: dict[str, Any]) -> bool:
    if isinstance(pattern, Var):
        if pattern.name in bound:
            return bool(bound[pattern.name] == value)
        bound[pattern.name] = value
        return True
    if isinstance(pattern, Pattern):
        return pattern._match(value, bound)
    return bool(pattern == value)


def value_name(node: fx.Node) -> str:
    """Return the name of a node's value in the text of programs, such as "linear_3", without the percent sign."""
    return str(node.target) if node.op == "placeholder" else node.name


def trimmed(args: Sequence[Any]) -> list[Any]:
    """Return the positional arguments `args` without Nones at the end. They are defaults of the op."""
    kept = list(args)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def described(value: Any) -> str:
    """Return a text for an argument of a call, for messages, such as "the result of ingot.rope" or "the constant 1"."""
    if not isinstance(value, fx.Node):
        return f"the constant {value!r}"
    if value.op == "placeholder":
        return f"the {value.meta['kind']} '{value.target}'"
    if value.target is operator.getitem:
        return f"a result of {target_name(value.args[0].target)}"  # type: ignore[union-attr]
    return f"the result of {target_name(value.target)}"


@dataclass
class Rewriter:
    """Changes one program for a pass. It infers types of added nodes, and records every rewrite.

    fuel      most rewrites that the pass may apply; None: no limit. `ingot bisect` lowers it to find a wrong rewrite.
    skipped   source line of a call in the model definition -> why no rewrite may begin there
    """

    program: Program
    fuel: int | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    excused: int = 0
    _anchors: list[tuple[str, str]] = field(default_factory=list)
    _made: list[list[fx.Node]] = field(default_factory=list)

    def take(self, node: fx.Node, tried: fx.Node | None = None) -> bool:
        """Begin a rewrite at `node`, and return whether it is allowed. If not, leave `node` unchanged.

        It is not allowed after `fuel` rewrites, or if `skipped` excludes it. Nodes that are added before the next
        `take` belong to this rewrite. So does `tried`, a node that the pass added earlier to ask backends about it.
        """
        if reason := self.skipped.get(node.meta.get("origin", "")):
            self.refuse(node, reason, by_request=True)
            return False
        if self.fuel is not None and len(self._anchors) >= self.fuel:
            return False
        if tried is not None and self._made:
            self._made[-1].remove(tried)
        self._anchors.append((value_name(node), node.meta.get("origin", "")))
        self._made.append([] if tried is None else [tried])
        return True

    def rewrites(self) -> tuple[Rewrite, ...]:
        """Return the records of all rewrites so far, in order."""
        return tuple(
            Rewrite(index, anchor, origin, tuple(value_name(node) for node in made if not node._erased))
            for index, ((anchor, origin), made) in enumerate(zip(self._anchors, self._made, strict=True))
        )

    def find(self, pattern: Pattern) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
        """Yield each call that the pattern matches, in program order, with the values of its variables by name.

        The caller may change the program between matches.
        """
        for node in list(self.program.calls()):
            if not node._erased and (bound := pattern.match(node)) is not None:
                yield node, bound

    def call(self, target: Any, *args: Any, before: fx.Node, origin: str | None = None, **kwargs: Any) -> fx.Node:
        """Add a call of `target` to the program, before the node `before`, and return it.

        `origin` is its source line in the model definition; None: the source line of `before`.
        """
        with self.program.graph.inserting_before(before):
            made = build.call(
                self.program,
                target.overload if isinstance(target, Op) else target,
                args,
                kwargs,
                origin=before.meta.get("origin", "") if origin is None else origin,
            )
        return self._noted(made)

    def add_param(self, name: str, spec: ParamSpec) -> fx.Node:
        """Add a param named `name` to the program, and return its node. `spec` has its type and recipe."""
        return self._noted(self.program.add_param(name, spec))

    def _noted(self, node: fx.Node) -> fx.Node:
        if self._made:
            self._made[-1].append(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let all calls that read `old` read `new` instead, and remove `old`."""
        old.replace_all_uses_with(new)
        self.program.graph.erase_node(old)

    def rename(self, node: fx.Node, name: str) -> None:
        """Give a node the name of a removed node that it replaces.

        So a value has one name before and after the pass.
        """
        node.name = name
        self.program.graph._graph_namespace._rename_object(node, name)

    def retype(self, nodes: Sequence[fx.Node]) -> None:
        """Infer the types of `nodes` again after their arguments changed.

        If a type changes, such as its strides, the types of the calls that read the node are inferred again too.
        """
        queue = list(nodes)
        while queue:
            node = queue.pop(0)
            if node.op != "call_function":
                continue
            value_type = infer(node.target, node.args, node.kwargs, self.program)
            if value_type != node.meta["type"]:
                node.meta["type"] = value_type
                queue.extend(node.users)

    def refuse(self, node: fx.Node, reason: str, *, by_request: bool = False) -> None:
        """Record why the pass did not rewrite `node`, although it almost matched.

        `by_request` says that the user's options or weights are the reason. The pass may then apply one rewrite fewer
        than expected.
        """
        self.refusals.append(Refusal(node.name, reason))
        self.excused += by_request
