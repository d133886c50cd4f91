"""insert-paged-kv: replaces pure attention by attention over a paged KV cache, a state of the program.

If each step holds whole sequences, attention within the step replaces it, and nothing is cached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.cache.dtype import CACHE_DTYPES, CacheScales, is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.cache.groups import FULL, CacheGroup, ordered
from ingot.ir.errors import OptionError, PassError
from ingot.ir.features import POOL, feeds_whole, find_ending
from ingot.ir.features.sharing import COLUMNS
from ingot.ir.infer_placement import cache_placement, placement_of
from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops.attention import stated_options
from ingot.ir.program import Program, StateSpec, named_arguments, tensor_type
from ingot.ir.types import LOADED_DIMS, Dim, TensorType
from ingot.passes.base import Pass, PassContext
from ingot.passes.index_caches import IndexCaches, chooser_of
from ingot.passes.rewrite import Rewriter, trimmed


@dataclass(frozen=True)
class InsertPagedKV(Pass):
    """Adds KV caches: each `attention` becomes a `kv_append` and a `paged_attention`.

    The cache of layer i is the state `kv.i`. Attention calls with the same `layer` share a cache, and the first one
    writes it. Caches with the same mask, such as a window, form a group that shares page numbers. An `attention` over
    chosen positions becomes a `sparse_attention`, and the keys of its indexer get the cache `index.i`.

    page_size        tokens per page
    kv_cache_dtype   "auto": the dtype of the keys. "fp8" and "int8": f8e4m3 and i8, with the scales of the `attention`
                     call
    per_token        for "fp8" and "int8": a scale for each token and head, in the cache; those of the call are unused

    In programs whose steps hold whole sequences, such as those of embedding models, `attention` becomes
    `step_attention`. Nothing is cached there.
    """

    name: ClassVar[str] = "insert-paged-kv"
    page_size: int = 16
    kv_cache_dtype: str = "auto"
    per_token: bool = False

    @property
    def numerics(self) -> Numerics:  # type: ignore[override]  # depends on the dtype; other passes have one contract
        return Numerics.ROUNDING if self.kv_cache_dtype == "auto" else Numerics.LOSSY

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        if self.page_size < 1:
            raise OptionError(f"page_size {self.page_size}", where=self.name, expected="a positive number of tokens")
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise OptionError(
                f"unknown kv_cache_dtype '{self.kv_cache_dtype}'", where=self.name, expected=", ".join(CACHE_DTYPES)
            )
        if self.per_token and CACHE_DTYPES[self.kv_cache_dtype] is None:
            raise OptionError(
                f"per_token with kv_cache_dtype '{self.kv_cache_dtype}'",
                where=self.name,
                expected="a cache of eight bits",
            )
        program = rewriter.program
        attentions = list(program.calls(ops.attention.overload))
        if not attentions:
            return
        if feeds_whole(program.ending):
            _within_steps(rewriter, attentions, context)
            return
        table_width = -(-context.max_seq_len // self.page_size)
        program.dims["B"] = Dim("B", 1, context.max_batch)
        program.dims["P"] = Dim("P", 1, table_width)
        program.dims["pages"] = Dim("pages", 1, LOADED_DIMS["pages"])
        groups = ordered(_group_of(node, context) for node in attentions)
        slots = {group: program.add_input(group.slots, TensorType(torch.int64, ("T",))) for group in groups}
        tables = {group: program.add_input(group.page_table, TensorType(torch.int32, ("B", "P"))) for group in groups}
        q_starts, q_lens, kv_lens = (
            program.add_input(name, TensorType(torch.int32, ("B",))) for name in ("q_starts", "q_lens", "kv_lens")
        )
        tree = find_ending(program.ending.name).tree
        ancestors = program.add_input("ancestors", TensorType(torch.int64, ("T",))) if tree else None
        # A tree puts several tokens of a sequence into a step; prefix sharing needs steps with one token per sequence.
        dense = any(chooser_of(node, context.max_seq_len) is None for node in attentions)
        sharing = _sharing(program, groups, context) if dense and not tree else None
        caches: dict[str, _Cache] = {}
        lens = (q_starts, q_lens, kv_lens)
        index = IndexCaches(rewriter, (tables[FULL], *lens), slots[FULL], self.page_size) if FULL in groups else None
        for node in attentions:
            if not rewriter.take(node):
                break
            bound, chooser = named_arguments(node), chooser_of(node, context.max_seq_len)
            q, k, v = bound["q"], bound["k"], bound["v"]
            if program.ending.name == POOL.name and Mask.named(bound["mask"]).looks_ahead:
                raise PassError(
                    f"with the mask {bound['mask']} a token sees later ones, but a step may hold a chunk of a sequence",
                    where=f"{self.name}, %{node.name}",
                    expected=f"the ending '{POOL.name}' with whole=1",
                )
            if context.deterministic and Mask.named(bound["mask"]).looks_ahead:
                raise OptionError(
                    f"with the mask {bound['mask']} a token sees later ones: results depend on prompt chunks",
                    where=f"{self.name}, %{node.name}",
                    expected="masks with which a token sees itself and earlier tokens",
                    hint="compile without deterministic",
                )
            if chooser is not None:
                _check_sparse(node, bound)
            if tree:
                _check_tree(node, bound, chooser, context)
                bound["mask"] = "tree"
            name, group = f"kv.{bound['layer']}", _group_of(node, context)
            kv_type = tensor_type(k)
            dtype = CACHE_DTYPES[self.kv_cache_dtype] or kv_type.dtype
            scales: dict[str, Any] = {}
            if is_narrow(dtype):
                given = CacheScales(per_token=True) if self.per_token else _scales_of(bound)
                scales |= given.options()
            holds = (k, v, bound["value_width"], group, scales)
            if name not in caches:
                form = replace(_form_of(bound), per_token=self.per_token)
                shape = form.shape(self.page_size, kv_type.shape[1])
                placement = cache_placement(placement_of(k, program))
                spec = StateSpec("paged_kv", group.name, "token", TensorType(dtype, shape), placement)
                state: fx.Node = program.add_state(name, spec)
                written = rewriter.call(ops.kv_append, state, k, v, slots[group], before=node, **scales)
                caches[name] = _Cache(written, holds)
            elif caches[name].holds != holds:
                raise PassError(
                    f"two attentions of layer {bound['layer']} have different keys and values, or different masks",
                    where=f"{self.name}, %{node.name}",
                    expected="one cache for both: the same keys, values and scales, and masks of one cache group",
                )
            options = {"scale": bound["scale"], **_options(bound), **scales}
            if chooser is not None:
                assert index is not None, "a causal mask keeps every token"
                args = (q, caches[name].written, index.choose(chooser), tables[group], q_starts, q_lens)
                rewriter.replace(node, rewriter.call(ops.sparse_attention, *args, before=node, **options))
                continue
            last = trimmed([bound["sinks"], ancestors, sharing if group == FULL else None, bound["slopes"]])
            args = (q, caches[name].written, tables[group], *lens, *last)
            rewriter.replace(node, rewriter.call(ops.paged_attention, *args, before=node, **options))
        ends = {name: one.written for name, one in caches.items()} | (index.written if index else {})
        program.set_outputs({**program.output_nodes(), **ends})


@dataclass(frozen=True)
class _Cache:
    """The KV cache of a layer.

    written   the node of the cache after this step's write
    holds     keys, values, value width, cache group (caches with the same page numbers) and scales. They must be equal
              for all attention calls that share the cache.
    """

    written: fx.Node
    holds: tuple[Any, ...]


def _within_steps(rewriter: Rewriter, attentions: Sequence[fx.Node], context: PassContext) -> None:
    """Replace each `attention` by `step_attention`, which needs no cache.

    It is for programs whose steps hold whole sequences, such as those of embedding models.
    """
    program = rewriter.program
    program.dims["B"] = Dim("B", 1, context.max_batch)
    by_sequence = TensorType(torch.int32, ("B",))
    q_starts, q_lens = (program.add_input(name, by_sequence) for name in ("q_starts", "q_lens"))
    for node in attentions:
        if not rewriter.take(node):
            break
        bound = named_arguments(node)
        if chooser_of(node, context.max_seq_len) is not None:
            raise PassError(
                "attention over chosen positions within a step",
                where=f"{InsertPagedKV.name}, %{node.name}",
                expected="attention over all positions, or a definition that generates",
            )
        if not (form := _form_of(bound)).equal:
            raise PassError(
                f"attention within a step, with {form}",
                where=f"{InsertPagedKV.name}, %{node.name}",
                expected="keys and values of equal width",
            )
        tensors = [bound[name] for name in ("q", "k", "v")]
        last = trimmed([bound["sinks"], bound["slopes"]])
        options = {"scale": bound["scale"], **_options(bound)}
        attended = rewriter.call(ops.step_attention, *tensors, q_starts, q_lens, *last, before=node, **options)
        rewriter.replace(node, attended)


def _check_tree(node: fx.Node, bound: Mapping[str, Any], chooser: fx.Node | None, context: PassContext) -> None:
    """Raise OptionError if the attention call `node` cannot verify a tree of draft tokens.

    `bound` maps names to the arguments of the call. `chooser` is the call that chooses the positions that it reads.
    """
    where = f"{InsertPagedKV.name}, %{node.name}"
    if chooser is not None:
        raise OptionError(
            "a tree of drafts: an indexer chooses positions, and several tokens of a tree share one",
            where=where,
            expected="attention over all positions in every layer",
            hint="compile a definition whose ending is 'verify', whose drafts are consecutive tokens",
        )
    if bound["slopes"] is not None:
        raise OptionError(
            "slopes need positions in the cache, and the tokens of a tree are not stored there in position order",
            where=where,
            expected="attention without slopes in every layer",
            hint="compile a definition whose ending is 'verify', whose drafts are consecutive tokens",
        )
    if bound["mask"] != CAUSAL.name:
        raise OptionError(
            f"a tree of drafts is verified by attention with the mask {bound['mask']}",
            where=where,
            expected=f"the mask {CAUSAL.name} in every layer",
            hint="compile a definition whose ending is 'verify', whose drafts are consecutive tokens",
        )
    if context.deterministic:
        raise OptionError(
            "a tree of drafts: several tokens share a position, so sums have another order than in plain decode",
            where=where,
            expected="consecutive drafts, with the ending 'verify'",
            hint="compile without deterministic",
        )


def _check_sparse(node: fx.Node, bound: Mapping[str, Any]) -> None:
    """Raise PassError if the attention call `node` over chosen positions has options that `sparse_attention` lacks.

    `bound` maps names to the arguments of the call.
    """
    others = [name for name in ("sinks", "slopes", "soft_cap") if bound[name] is not None]
    others += [] if bound["mask"] == CAUSAL.name else [f"mask {bound['mask']}"]
    if others:
        raise PassError(
            f"attention over chosen positions with {', '.join(others)}",
            where=f"{InsertPagedKV.name}, %{node.name}",
            expected=f"the mask {CAUSAL.name}, and no sinks, slopes or soft cap",
        )


def _sharing(program: Program, groups: list[CacheGroup], context: PassContext) -> fx.Node | None:
    """Add the program input `sharing`, a table of prompt prefixes that several sequences share, and return it.

    Return None if no kernel can use the table. Only GPU kernels use it, for caches that keep every token. Deterministic
    mode has none, because the table changes rounding.
    """
    if context.target.device != "cuda" or context.deterministic or FULL not in groups or context.max_batch < 2:
        return None
    program.dims["G"] = Dim("G", 1, context.max_batch)
    return program.add_input("sharing", TensorType(torch.int32, ("G", COLUMNS)))


def _form_of(bound: Mapping[str, Any]) -> CacheForm:
    """Return how the cache of an `attention` call stores keys and values.

    It stores them separately, side by side, or the values within the keys. `bound` maps names to the arguments of the
    call.
    """
    v = None if bound["v"] is None else tensor_type(bound["v"])
    return CacheForm.given(tensor_type(bound["q"]), tensor_type(bound["k"]), v, bound["value_width"])


def _options(bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an `attention` call that differ from their defaults, by name, without scales of the cache.

    `bound` maps names to the arguments of the call.
    """
    return stated_options({name: value for name, value in bound.items() if name not in ("k_scale", "v_scale")})


def _scales_of(bound: Mapping[str, Any]) -> CacheScales:
    """Return the cache scales of keys and values from an `attention` call. `bound` maps names to its arguments.

    If values are a part of the keys, they have the scale of the keys.
    """
    scales = CacheScales.of(bound)
    return scales if bound["v"] is not None else CacheScales(scales.k, scales.k)


def _group_of(node: fx.Node, context: PassContext) -> CacheGroup:
    """Return the cache group of an `attention` call, according to its mask. Caches of one group share page numbers.

    A window as long as the longest sequence never frees pages. So it belongs to the group of caches that keep every
    token.
    """
    mask = Mask.named(named_arguments(node)["mask"])
    return FULL if mask.size >= context.max_seq_len else CacheGroup.of(mask)
