"""Find the faulty node among those that a rewrite made: the node with right inputs and a wrong result."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ingot.debug.bisect.programs.observe import Observed, Tensors, by_token, is_by_token, observe
from ingot.debug.bisect.programs.schedule import Step
from ingot.ir.interpret import interpret
from ingot.ir.numerics.contracts import Measured
from ingot.ir.numerics.recording import is_part_of_rows
from ingot.ir.program import Program, RegionCall, target_name, tensor_type
from ingot.ir.text import print_call, value_name
from ingot.ir.types import TensorType

# A function that compares two values that should be equal. It returns how they differ, in words; None if they do not.
Differs = Callable[[Measured, Measured], str | None]
_SLICE = torch.ops.aten.slice.Tensor


@dataclass(frozen=True)
class Site:
    """The place of a fault in a program.

    `node` names the faulty node, and `tensor` the first wrong value. `instead_of` names the value before the pass that
    `tensor` replaces, "" if there is none. `text` describes the difference. Names have no percent sign, unlike in the
    text of a program.
    """

    node: str
    op: str
    origin: str
    tensor: str
    instead_of: str
    text: str


@dataclass
class ObservedProgram:
    """A program and the recorded values of its nodes in some steps.

    `found` has the values in the program's dtypes, and `exact` the values in float64. `rows` has the indices of the
    tokens to compare, None for all tokens.
    """

    program: Program
    params: Sequence[Tensors]
    found: list[Observed]
    exact: list[Observed]
    rows: torch.Tensor | None = None

    @staticmethod
    def run(
        program: Program,
        params: Sequence[Tensors],
        steps: Sequence[Step],
        pages: int,
        names: set[str],
        rows: torch.Tensor | None = None,
    ) -> "ObservedProgram":
        """Interpret a program in its own dtypes and in float64. Record the values of the nodes in `names` in both runs.

        `pages` is the number of cache pages. `rows` has the indices of the tokens to compare later, None for all
        tokens.
        """
        found, exact = (
            list(observe(program, params, steps, pages, exact=exact, watch=names)) for exact in (False, True)
        )
        return ObservedProgram(program, params, found, exact, rows)

    def value(self, node: fx.Node) -> Measured | None:
        """Return a node's recorded value, joined over the steps; None if it was not recorded.

        Rows of tokens are in the order of the requests. On a mesh, the values of all ranks are combined into one. If
        they cannot be combined, return None.
        """
        found, exact = (self._assembled(node, side) for side in (self.found, self.exact))
        return None if found is None or exact is None else Measured(found, exact)

    def _assembled(self, node: fx.Node, side: list[Observed]) -> torch.Tensor | None:
        parts = by_token(self.program, side, node.name)
        if self.rows is not None and is_by_token(node):
            parts = [part[self.rows] for part in parts]
        if not parts or len(parts) == 1:
            return parts[0] if parts else None
        placement = node.meta.get("placement", ())
        if node.op == "placeholder" and node.meta["kind"] == "param":
            placement = self.program.params[str(node.target)].placement
        if not placement or is_part_of_rows(node):  # these are joined already
            return parts[0]
        (place,) = placement if len(placement) == 1 else (None,)
        if place is None or place.segments:
            return None
        return sum(parts[1:], parts[0]) if place.kind == "partial" else torch.cat(parts, place.dim)


def locate(
    before: Program,
    after: Program,
    run: Callable[[Program, set[str]], ObservedProgram],
    differs: Differs,
    known: Mapping[str, torch.Tensor],
) -> Site | None:
    """Find where the program after a pass first computes another value than the program before it. Return None if all
    compared values are equal.

    Two values are compared if they must be equal: values of nodes with the same name, arguments of such nodes, and
    outputs with the same name.

    `run` interprets a program and records the nodes with the given names. `differs` compares two values. `known` has
    expected values that `before` does not compute. Keys are names of outputs, and names of ops that occur once.
    """
    made = _made(before, after)
    gone = _made(after, before)
    pairs = _pairs(before, after)
    for chosen in ([pair for pair in pairs if _is_near(pair, made)], pairs):
        watched = {old.name for old, _, _ in chosen} | {node.name for node in gone}
        regions = {source for node in made if isinstance(node.target, RegionCall) for source in node.all_input_nodes}
        seen = {new for _, new, _ in chosen} | made | regions
        sides = run(before, watched), run(after, {node.name for node in seen})
        if site := _Search(before, after, *sides, chosen, differs, known).first():
            return site
    return None


def _is_near(pair: "Pair", made: set[fx.Node]) -> bool:
    """Return whether a pair of nodes is next to a node that the pass made.

    The two nodes of a pair must have equal values. A fault shows first next to the made nodes, so these pairs are
    compared first. `made` are the nodes that the pass made.
    """
    old, new, user = pair
    if user is not None or new.op == "placeholder" or print_call(old) != print_call(new):
        return True
    return any(source in made for source in new.all_input_nodes)


def _nodes(program: Program) -> dict[str, fx.Node]:
    return {value_name(node): node for node in program.graph.nodes if node.op != "output"}


def _made(before: Program, after: Program) -> set[fx.Node]:
    old = _nodes(before)
    return {node for name, node in _nodes(after).items() if name not in old}


Pair = tuple[fx.Node, fx.Node, fx.Node | None]


def _pairs(before: Program, after: Program) -> list[Pair]:
    """Return the pairs of nodes that must have equal values, each as (node of `before`, node of `after`, reader).

    Pairs are nodes with the same name, arguments of such nodes, and outputs with the same name. For arguments, the
    reader is the node of `after` that reads them. Otherwise it is None.
    """
    old, new = _nodes(before), _nodes(after)
    pairs: list[Pair] = []
    for name, node in new.items():
        same = old.get(name)
        if same is None or same.op != node.op:
            continue
        is_given = node.op == "placeholder" and node.meta["kind"] == "input"  # a step input, not computed
        if not is_given and _comparable(same, before) and _comparable(node, after):
            pairs.append((same, node, None))
        if node.target != same.target:
            continue
        was, now = _arguments(same), _arguments(node)
        if len(was) != len(now):
            continue
        for one, other in zip(was, now, strict=True):
            if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
                continue
            if value_name(one) != value_name(other) and _comparable(one, before) and _comparable(other, after):
                pairs.append((one, other, node))
    outputs = before.output_nodes()
    for name, node in after.output_nodes().items():
        if name in outputs and _comparable(outputs[name], before) and _comparable(node, after):
            pairs.append((outputs[name], node, None))
    return pairs


def _arguments(node: fx.Node) -> list[object]:
    flat: list[object] = []
    for value in (*node.args, *node.kwargs.values()):
        flat += value if isinstance(value, list | tuple) else [value]
    return flat


def _comparable(node: fx.Node, program: Program) -> bool:
    """Return whether a node's value can be compared between programs.

    States cannot. Tensors with a row per sequence cannot either, since their rows change from step to step.
    """
    value_type = node.meta["type"]
    if not isinstance(value_type, TensorType) or value_type.shape[:1] in (("B",), ("R",), ("S",)):
        return False
    # The host passes -1 for a token that is only on the device, so the input is not the token that the step reads.
    return not (node.op == "placeholder" and node.meta["kind"] == "input" and "last_token" in program.states)


def _known(after: Program, made: set[fx.Node], known: Mapping[str, torch.Tensor]) -> list[tuple[str, fx.Node]]:
    """Return the nodes of `after` with an expected value in `known`, as pairs of the key in `known` and the node.

    They are outputs, and calls that the pass made. `made` are the nodes that the pass made.
    """
    found = [(name, node) for name, node in after.output_nodes().items() if name in known]
    for name in known:
        calls = [node for node in made if node.op == "call_function" and target_name(node.target) == name]
        found += [(name, calls[0])] if len(calls) == 1 else []
    return found


class _Search:
    def __init__(
        self,
        before: Program,
        after: Program,
        old: ObservedProgram,
        new: ObservedProgram,
        pairs: list[Pair],
        differs: Differs,
        known: Mapping[str, torch.Tensor],
    ) -> None:
        self.before, self.after, self.old, self.new, self.differs = before, after, old, new, differs
        self.order = {node: place for place, node in enumerate(after.graph.nodes)}
        self.made = _made(before, after)
        self.problems: dict[fx.Node, str] = {}
        self.expected: dict[fx.Node, fx.Node] = {}
        self.good: set[fx.Node] = set()
        self.misread: dict[fx.Node, Pair] = {}
        for pair in sorted(pairs, key=lambda pair: self.order[pair[1]]):
            self._judge(pair)
        for name, node in _known(after, self.made, known):
            value, wanted = self.new.value(node), known[name]
            if value is not None and (problem := differs(Measured(wanted, wanted), Measured(value.exact, value.exact))):
                self.problems.setdefault(node, problem)
            else:
                self.good.add(node)

    def _judge(self, pair: Pair) -> None:
        old, new, user = pair
        values = self.old.value(old), self.new.value(new)
        if values[0] is None or values[1] is None:
            return
        problem = self.differs(values[0], values[1])
        if problem is None:
            self.good.add(new)
            self.expected.setdefault(new, old)
        elif user is not None and new not in self.made:
            self.misread.setdefault(user, pair)  # the value itself is right, but this reader should read another
        elif new not in self.problems:
            self.problems[new] = problem
            self.expected[new] = old

    def first(self) -> Site | None:
        wrong = [node for node in self.problems if node not in self.good]
        candidates = sorted([*wrong, *self.misread], key=self.order.__getitem__)
        if not candidates:
            return None
        node = candidates[0]
        if node in self.misread and (node not in self.problems or self._cause(node) is node):
            old, new, _ = self.misread[node]
            text = f"it reads {value_name(new)}, which is not the replacement of {value_name(old)}"
            return self._site(node, new, old, text)
        return self._site(self._cause(node), node, self.expected.get(node), self.problems[node])

    def _site(self, node: fx.Node, tensor: fx.Node, old: fx.Node | None, text: str) -> Site:
        inner = self._inner(node) if isinstance(node.target, RegionCall) else None
        blamed = inner or node
        name = value_name(blamed)[1:]
        return Site(
            node=f"{value_name(node)[1:]}/{name}" if inner else name,
            op=_op(blamed),
            origin=blamed.meta.get("origin", ""),
            tensor=value_name(tensor)[1:],
            instead_of="" if old is None else value_name(old)[1:],
            text=text,
        )

    def _cause(self, node: fx.Node, wanted: Measured | None = None) -> fx.Node:
        """Return the faulty node that made the value of `node` wrong.

        The search follows operands with values that could not be checked. It ends at the first call with right inputs.

        `wanted` is the value that `node` should have, None if unknown. An operand that already has this value counts as
        right. An example is the operand of a cast.
        """
        if wanted is None and node in self.expected:
            wanted = self.old.value(self.expected[node])
        unknown = self._unknown(node, wanted)
        if not unknown:
            return node
        source = unknown[0]
        if node.target is operator.getitem:
            return node if self._elsewhere(node, source) else self._cause(source, wanted)
        if node.target is _SLICE and self._inside(node, source):
            return self._misplaced(node, source)
        if len(unknown) > 1:
            computed = [one for one in unknown if one.op == "call_function"]
            source = computed[0] if computed else source
        if source.op == "placeholder":
            is_param = source.meta["kind"] == "param"
            return source if is_param and self._param_differs(source) else node
        return self._cause(source, wanted)

    def _unknown(self, node: fx.Node, wanted: Measured | None) -> list[fx.Node]:
        """Return the operands of `node` that may be wrong. These were made by the pass, and no comparison found them
        right.

        `wanted` is the value that `node` should have, None if unknown. Operands with this value are right.
        """
        sources = [one for one in node.all_input_nodes if one in self.made and one not in self.good]
        return [one for one in sources if not self._is(one, wanted)]

    def _is(self, node: fx.Node, wanted: Measured | None) -> bool:
        value = None if wanted is None else self.new.value(node)
        if value is None or wanted is None or value.exact.shape != wanted.exact.shape:
            return False
        return self.differs(wanted, value) is None

    def _elsewhere(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether `node` takes the wrong item of a tuple. The call `source` returns the tuple.

        This is so if another item of the tuple has the value that `node` should have.
        """
        wanted = self.old.value(self.expected[node]) if node in self.expected else None
        others = [user for user in source.users if user.target is operator.getitem and user is not node]
        values = [self.new.value(other) for other in others]
        return wanted is not None and any(
            value is not None and value.exact.shape == wanted.exact.shape and self.differs(wanted, value) is None
            for value in values
        )

    def _inside(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether the slice `node` takes the wrong part of a tensor: the right value is elsewhere in
        `source`."""
        return self._offset(node, source) is not None

    def _offset(self, node: fx.Node, source: fx.Node) -> int | None:
        whole, old = self.new.value(source), self.expected.get(node)
        wanted = self.old.value(old) if old is not None else None
        if whole is None or wanted is None or wanted.exact.dim() != whole.exact.dim():
            return None
        dim = int(str(node.args[1]))
        width = wanted.exact.shape[dim]
        for begin in range(whole.exact.shape[dim] - width + 1):
            part = Measured(whole.found.narrow(dim, begin, width), whole.exact.narrow(dim, begin, width))
            if part.exact.shape == wanted.exact.shape and self.differs(wanted, part) is None:
                return begin
        return None

    def _misplaced(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Return the faulty node if the slice `node` takes the wrong part of `source`. It is the slice or a merged
        param.

        Usually it is the slice. But all slices of `source` may be adjacent and in order. Then the merged param that
        `source` reads may have its parts in the wrong order.
        """
        slices = sorted((user for user in source.users if user.target is _SLICE), key=self.order.__getitem__)
        begin = 0
        for one in slices:
            if int(str(one.args[2])) != begin:
                return node
            begin = int(str(one.args[3]))
        params = [one for one in source.all_input_nodes if one in self.made and one.op == "placeholder"]
        swapped = [one for one in slices if one in self.problems and self._inside(one, source)]
        return params[0] if params and len(swapped) > 1 and self._param_differs(params[0]) else node

    def _param_differs(self, param: fx.Node) -> bool:
        """Return whether a param that the pass merged lacks rows of the original params, or has these params in another
        order."""
        # Use rank 0: on a mesh, each rank holds its part of every param.
        whole, kept = self.new.params[0][str(param.target)], _nodes(self.after).keys()
        gone = [node for name, node in _nodes(self.before).items() if node.op == "placeholder" and name not in kept]
        place = {node: index for index, node in enumerate(self.before.graph.nodes)}
        parts = [
            self.old.params[0][str(node.target)]
            for node in sorted(gone, key=lambda node: min((place[user] for user in node.users), default=0))
            if node.meta["kind"] == "param" and tensor_type(node).dtype == tensor_type(param).dtype
        ]
        begins = [_row_of(whole, part) for part in parts if part.dim() == whole.dim()]
        return not begins or None in begins or begins != sorted(begins)  # type: ignore[type-var]

    def _inner(self, call: fx.Node) -> fx.Node | None:
        """Find the faulty call inside a region, a group of calls that one backend compiles together.

        Calls in the region's body have the names of the calls before the pass. The first call with another value than
        before is faulty. Return None if there is none, or if the region's arguments are wrong.
        """
        callers = [node for node in self.after.calls() if node.target == call.target]
        if self.after.mesh or callers[0] is not call:
            return None  # the body has the names of its first call's nodes
        assert isinstance(call.target, RegionCall)
        body = self.after.regions[call.target.name].body
        # All arguments; a repeated one appears twice.
        values = [self.new.value(node) for node in call.args if isinstance(node, fx.Node)]
        sources = [value for value in values if value is not None]
        if len(sources) < len(values):
            return None
        inner: dict[str, torch.Tensor] = {}

        def keep(node: fx.Node, value: object) -> None:
            if isinstance(value, torch.Tensor):
                inner[node.name] = value

        given = dict(zip(body.input_types(), (source.exact for source in sources), strict=True))
        interpret(body, given, exact=True, watch=keep)
        old = {node.name: node for node in self.before.calls()}
        for node in body.calls():
            wanted = self.old.value(old[node.name]) if node.name in old else None
            value = inner.get(node.name)
            if wanted is None or value is None or wanted.exact.shape != value.shape:
                continue
            if self.differs(Measured(wanted.exact, wanted.exact), Measured(value, value)) is not None:
                inputs = [source for source in node.all_input_nodes if source.op == "placeholder"]
                misgiven = any(self._matches_no_reader(source, given[str(source.target)], old) for source in inputs)
                return None if misgiven else node
        return None

    def _matches_no_reader(self, source: fx.Node, value: torch.Tensor, old: Mapping[str, fx.Node]) -> bool:
        """Return whether the input `source` of a region's body has a wrong value.

        `value` is its value now. The input is wrong if no call that reads it had read this value before the pass. `old`
        maps names to the calls before the pass.
        """
        fits = []
        for user in source.users:
            was = _arguments(old[user.name]) if user.name in old else []
            for argument, one in zip(_arguments(user), was, strict=False):
                wanted = self.old.value(one) if argument is source and isinstance(one, fx.Node) else None
                if wanted is not None:
                    same = wanted.exact.shape == value.shape
                    measured = Measured(wanted.exact, wanted.exact), Measured(value, value)
                    fits.append(same and self.differs(*measured) is None)
        return bool(fits) and not any(fits)


def _row_of(whole: torch.Tensor, part: torch.Tensor) -> int | None:
    """Return the row of the tensor `whole` where a copy of `part` begins; None if `whole` does not contain `part`."""
    if part.shape[1:] != whole.shape[1:]:
        return None
    begins = range(whole.shape[0] - part.shape[0] + 1)
    return next((begin for begin in begins if torch.equal(whole[begin : begin + part.shape[0]], part)), None)


def _op(node: fx.Node) -> str:
    return str(node.meta["kind"]) if node.op == "placeholder" else target_name(node.target)
