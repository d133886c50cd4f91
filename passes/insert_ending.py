"""insert-ending: adds the calls that read positions from device rows and choose tokens from the outputs."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from ingot.ir.artifact.record import Numerics
from ingot.ir.cache.groups import FULL, table_groups
from ingot.ir.errors import PassError
from ingot.ir.features import (
    Attribute,
    Ending,
    EndingUse,
    Feature,
    OpCall,
    RowState,
    find_ending,
    find_feature,
    find_input,
)
from ingot.ir.ops import OPS
from ingot.ir.ops.logit_edits import EditParts
from ingot.ir.program import StateSpec, tensor_type
from ingot.ir.types import Dim, StateType, TensorType
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, trimmed


@dataclass(frozen=True)
class InsertEnding(Pass):
    """Adds the calls before and after the model, such as reading positions and sampling tokens.

    The program's ending (such as `sample`) and its features (such as penalties) declare these calls in
    `ingot.ir.features`. Calls before the model read states with one row per sequence, such as positions. Calls after it
    choose tokens and update these states.
    """

    name: ClassVar[str] = "insert-ending"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        ending = find_ending(program.ending.name)
        features = [find_feature(name) for name in (*ending.features, *program.ending.features)]
        outputs = program.output_nodes()
        if missing := [name for name in ending.needs if name not in outputs]:
            raise PassError(
                f"the ending '{ending.name}' needs the output '{missing[0]}'",
                where=f"entry {program.name}",
                expected=f"an entry that returns {', '.join(ending.needs)}",
            )
        if not rewriter.take(outputs[ending.needs[0]]):
            return
        attributes = _attributes(program.ending, ending)
        fed = ending.lengths(attributes)
        if ending.all_or_none and context.max_seq_len % fed:
            raise PassError(
                f"max_seq_len = {context.max_seq_len}, but the ending '{ending.name}' takes {fed} tokens at once",
                where=f"entry {program.name}",
                expected=f"a multiple of {fed}",
            )
        program.dims.setdefault("B", Dim("B", 1, context.max_batch))
        program.dims["R"] = Dim("R", 1, context.max_batch)
        _Builder(rewriter, ending, attributes).build(features)


def _attributes(use: EndingUse, ending: Ending) -> dict[str, Attribute]:
    if odd := [name for name, _ in use.attributes if name not in ending.attributes]:
        raise PassError(
            f"the ending '{ending.name}' has no attribute '{odd[0]}'", expected=", ".join(ending.attributes)
        )
    found = ending.set_by(use)
    if odd := [name for name, value in found.items() if type(value) is not type(ending.attributes[name])]:
        raise PassError(
            f"the attribute '{odd[0]}' of the ending '{ending.name}' is {found[odd[0]]!r}",
            expected=f"one like {ending.attributes[odd[0]]!r}",
        )
    if misfit := ending.misfit(found):
        raise PassError(f"the ending '{ending.name}': {misfit}")
    return found


@dataclass
class _Builder:
    """Adds the calls that an ending and its features declare to a program.

    values    name -> value, for arguments of calls
    aliases   input name -> input to use instead, such as "page_table" -> "page_table_window_1024". They are for
              programs in which no KV cache keeps every token.
    """

    rewriter: Rewriter
    ending: Ending
    attributes: dict[str, Attribute]
    values: dict[str, fx.Node] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # step inputs of caches that the program lacks

    def build(self, features: Sequence[Feature]) -> None:
        program = self.rewriter.program
        outputs = program.output_nodes()
        caches = [spec for spec in program.states.values() if spec.kind == "paged_kv"]
        if caches:
            page_size = caches[0].type.shape[2]
            assert isinstance(page_size, int)
            self.attributes["page_size"] = page_size
        else:
            self.attributes["page_size"] = 1  # no pages
        given = {str(node.target): node for node in program.placeholders("input")}
        groups = table_groups(given)
        if not groups:
            self.absent = frozenset({FULL.page_table})
        else:
            self.aliases = {FULL.page_table: groups[0].page_table, FULL.slots: groups[0].slots}
        self.values = {**given, **outputs}
        for row in [row for feature in features for row in feature.rows]:
            if row.name not in program.states:
                self.values[row.name] = self._row(row)
        made = self._add_before_model(features, given)
        for name, node in outputs.items():
            self.values[name] = node
        self._redirect_inputs(given, made)
        end = program.graph.output_node()
        if "logits" in outputs:
            self.values["choices"] = outputs["logits"]
        between = [call for feature in features for call in feature.between]
        after = [call for feature in features for call in feature.after]
        for call in (*between, *self.ending.calls, *after):
            self._call(call, end)
        kept = [name for name, node in outputs.items() if isinstance(node.meta["type"], StateType)]
        for name in kept:
            self._end_cache(name, end)
        states = {name: self.values[name] for name in program.states if name in self.values}
        assert all(isinstance(node.meta["type"], StateType) for node in states.values())
        own = {one.name: self.values[one.value] for one in self.ending.outputs}
        passed = {name: node for name, node in outputs.items() if not isinstance(node.meta["type"], StateType)}
        caches_out = {name: self.values[name] for name in kept}
        program.set_outputs({**own, **passed, **caches_out, **states})

    def _end_cache(self, name: str, end: fx.Node) -> None:
        """Add the calls that the ending declares for each KV cache, for the cache `name`.

        Do nothing if the state `name` is no KV cache.
        """
        if self.rewriter.program.states[name].kind == "paged_kv":
            for call in self.ending.caches:
                self.values["kv"] = self.values[name]
                self._call(call, end)
                self.values[name] = self.values.pop("kv")

    def _row(self, row: RowState) -> fx.Node:
        """Add a state with one row per running sequence, such as the last token, and return its node.

        `row` is the declaration of the state in a feature, such as penalties.
        """
        program = self.rewriter.program
        if row.like:
            like = tensor_type(self._value(row.like, f"row {row.name}"))
            dtype, shape = like.dtype, like.shape[1:]
        else:
            sizes = dict(self.attributes)
            if "logits" in self.values:
                vocab = tensor_type(self.values["logits"]).shape[-1]
                assert isinstance(vocab, int)
                sizes |= {"vocab": vocab, "edit_words": EditParts(vocab).words}
            dtype, shape = row.dtype, tuple(int(sizes[one]) if isinstance(one, str) else one for one in row.shape)
        return program.add_state(row.name, StateSpec("row", "rows", "sequence", TensorType(dtype, ("R", *shape))))

    def _add_before_model(self, features: Sequence[Feature], given: Mapping[str, fx.Node]) -> set[fx.Node]:
        """Add the calls that features, such as penalties, declare before the model's calls. Return all added nodes.

        `given` maps names to the program's inputs.
        """
        program = self.rewriter.program
        first = next(program.calls())
        made: set[fx.Node] = set()
        # `feed` returns the slots of the first group.
        others = [
            OpCall("page_slots", (group.slots,), {"page_table": group.page_table}) for group in table_groups(given)[1:]
        ]
        for call in [*(call for feature in features for call in feature.before), *others]:
            made |= self._call(call, first)
        return made

    def _redirect_inputs(self, given: Mapping[str, fx.Node], made: set[fx.Node]) -> None:
        """Let the model read values computed on the device, such as positions, instead of the inputs of the same names.

        `given` maps names to the program's inputs. `made` are the nodes that compute these values. They still read the
        inputs.
        """
        for name, node in given.items():
            fed = self.values[name]
            if fed is not node:
                node.replace_all_uses_with(fed, delete_user_cb=lambda user: user not in made)
                if not node.users:  # an input that a call before the model reads stays
                    self.rewriter.program.graph.erase_node(node)

    def _call(self, call: OpCall, before: fx.Node) -> set[fx.Node]:
        """Add a call before the node `before`. A feature, such as penalties, or the ending declares it as `call`.

        Its arguments are found by their names. Return the node of the call, and the nodes that take the items of its
        result.
        """
        op = OPS[call.op]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in op.overload._schema.arguments:
            name = call.given.get(parameter.name, self.aliases.get(parameter.name, parameter.name))
            if parameter.kwarg_only:
                kwargs[parameter.name] = self._attribute(name, call)
            elif name in self.absent:
                args.append(None)
            elif parameter.has_default_value() and name not in self.values and find_input(name) is None:
                args.append(parameter.default_value)
            else:
                args.append(self._value(name, f"the call of {call.op}"))
        origin = InsertEnding.name
        node = self.rewriter.call(op, *trimmed(args), before=before, origin=origin, **kwargs)
        made = {node}
        if len(call.results) == 1:
            self.values[call.results[0]] = node
            return made
        for index, name in enumerate(call.results):
            if name:
                name = self.aliases.get(name, name)
                item = self.rewriter.call(operator.getitem, node, index, before=before, origin=origin)
                self.values[name] = item
                made.add(item)
        return made

    def _attribute(self, name: str, call: OpCall) -> Attribute:
        if name not in self.attributes:
            raise PassError(
                f"{call.op} needs the attribute '{name}', which the ending lacks",
                where=f"entry {self.rewriter.program.name}, ending {self.ending.name}",
                expected=", ".join(self.attributes),
            )
        return self.attributes[name]

    def _value(self, name: str, what: str) -> fx.Node:
        """Return the value `name`, for an argument of a call.

        If it is a step input that the program lacks, it is added. `what` names the call in errors. Raises PassError for
        an unknown name.
        """
        if name not in self.values:
            declared = find_input(name)
            if declared is None:
                raise PassError(
                    f"{what} needs '{name}', which has no source",
                    where=f"entry {self.rewriter.program.name}, ending {self.ending.name}",
                    expected="a step input of a feature, a row of state, or an output of the entry",
                )
            self.values[name] = self.rewriter.program.add_input(name, declared.type)
        return self.values[name]
