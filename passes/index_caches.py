"""The caches of indexers: `choose_positions` over the step's own keys becomes `paged_choose_positions` over a cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ingot.ir import ops
from ingot.ir.cache.form import CacheForm
from ingot.ir.cache.groups import FULL
from ingot.ir.errors import PassError
from ingot.ir.infer_placement import cache_placement, placement_of
from ingot.ir.program import Program, StateSpec, is_call, named_arguments, tensor_type
from ingot.ir.types import TensorType
from ingot.passes.rewrite import Rewriter, described


def chooser_of(attention: fx.Node, max_seq_len: int) -> fx.Node | None:
    """Return the `choose_positions` call that chooses what an `attention` call reads.

    None if the attention reads all positions of the mask: it has no chosen positions, or a sequence is never longer
    than the number of positions that the call chooses. Raises PassError if another value says what is chosen.
    """
    chosen = named_arguments(attention)["chosen"]
    if chosen is None:
        return None
    if not is_call(chosen, ops.choose_positions.overload):
        raise PassError(
            f"the chosen positions of an attention are {described(chosen)}",
            where=f"insert-paged-kv, %{attention.name}",
            expected="the result of ingot.choose_positions",
        )
    assert isinstance(chosen, fx.Node)
    return chosen if named_arguments(chosen)["top_k"] < max_seq_len else None


@dataclass
class IndexCaches:
    """The caches of a program's indexers, and the calls that choose positions among them.

    Layer i has the state `index.i` [pages, 1, page, 1, D], with the dtype of the keys. It keeps every token, so it has
    the pages of the cache group FULL.

    step        the inputs `page_table`, `q_starts`, `q_lens` and `kv_lens`
    slots       the input with the step's cache slots
    page_size   tokens of a page
    written     state -> its node after this step's write
    """

    rewriter: Rewriter
    step: tuple[fx.Node, ...]
    slots: fx.Node
    page_size: int
    written: dict[str, fx.Node] = field(default_factory=dict)
    _keys: dict[str, fx.Node] = field(default_factory=dict)
    _made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def choose(self, chooser: fx.Node) -> fx.Node:
        """Return the `paged_choose_positions` call that replaces `chooser`, a call of `choose_positions`.

        Raises PassError if another indexer of the same layer has other keys.
        """
        if chooser not in self._made:
            bound = named_arguments(chooser)
            name = f"index.{bound['layer']}"
            if self._keys.setdefault(name, bound["k"]) is not bound["k"]:
                raise PassError(
                    f"two indexers of layer {bound['layer']} have different keys",
                    where=f"insert-paged-kv, %{chooser.name}",
                    expected="the same keys for both, which have one cache",
                )
            self._made[chooser] = self.rewriter.call(
                ops.paged_choose_positions,
                bound["q"],
                self.written.get(name) or self._write(name, chooser, bound),
                bound["weights"],
                *self.step,
                before=chooser,
                top_k=bound["top_k"],
            )
        return self._made[chooser]

    def _write(self, name: str, chooser: fx.Node, bound: Mapping[str, Any]) -> fx.Node:
        """Add the state `name` and the call that writes the step's keys to it. Return the new version of the state."""
        program: Program = self.rewriter.program
        keys = tensor_type(bound["k"])
        shape = CacheForm.of(keys, None).shape(self.page_size, keys.shape[1])
        placement = cache_placement(placement_of(bound["k"], program))
        spec = StateSpec("paged_kv", FULL.name, "token", TensorType(keys.dtype, shape), placement)
        state = program.add_state(name, spec)
        self.written[name] = self.rewriter.call(ops.kv_append, state, bound["k"], None, self.slots, before=chooser)
        return self.written[name]
