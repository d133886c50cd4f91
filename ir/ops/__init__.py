"""The ops that programs call, in addition to a few of aten. `OPS` holds them by name; each is a callable as well."""

from ingot.ir.ops.activations import activate, clamp, gelu_mul, silu_mul, soft_cap
from ingot.ir.ops.append_attention import append_attention
from ingot.ir.ops.attention import attention
from ingot.ir.ops.blocks import fill_block, take_block
from ingot.ir.ops.choose_positions import choose_positions, paged_choose_positions
from ingot.ir.ops.collectives import all_gather, all_reduce, redistribute, reduce_scatter, take_part, vocab_embedding
from ingot.ir.ops.dense import (
    add_rms_norm,
    cast,
    embedding,
    head_linear,
    layer_norm,
    linear,
    rms_norm,
    rope,
    select_rows,
)
from ingot.ir.ops.drafts import accept_drafts, read_rows, take_drafts, write_rows
from ingot.ir.ops.experts import experts
from ingot.ir.ops.kv_append import kv_append
from ingot.ir.ops.latent_attention import latent_attention
from ingot.ir.ops.logprobs import top_logprobs
from ingot.ir.ops.lora import lora_expand, lora_shrink
from ingot.ir.ops.paged_attention import paged_attention
from ingot.ir.ops.partial_attention import merge_attention, partial_attention
from ingot.ir.ops.penalties import count_tokens
from ingot.ir.ops.pool import pool
from ingot.ir.ops.position_scale import scale_by_position
from ingot.ir.ops.quant import dequantize, quant_linear
from ingot.ir.ops.registry import OPS, Cost, Effect, Op, Sample, define, op_of
from ingot.ir.ops.rope_append import qk_norm_rope_append
from ingot.ir.ops.rounded_linear import round_rows, rounded_linear
from ingot.ir.ops.route import route, sparse_mixer
from ingot.ir.ops.sampling import sample
from ingot.ir.ops.sparse_attention import sparse_attention
from ingot.ir.ops.sparsity import gaussian_top_k
from ingot.ir.ops.state import state_copy, state_move, state_zero
from ingot.ir.ops.step import advance, feed, page_slots
from ingot.ir.ops.step_attention import step_attention
from ingot.ir.ops.step_latent_attention import step_latent_attention
from ingot.ir.ops.streams import concat, match_rms, mix
from ingot.ir.ops.tree import accept_tree, move_slots, tree_ancestors, tree_positions

__all__ = [
    "OPS",
    "Cost",
    "Effect",
    "Op",
    "Sample",
    "accept_drafts",
    "accept_tree",
    "activate",
    "add_rms_norm",
    "advance",
    "all_gather",
    "all_reduce",
    "append_attention",
    "attention",
    "cast",
    "choose_positions",
    "clamp",
    "concat",
    "count_tokens",
    "define",
    "dequantize",
    "embedding",
    "experts",
    "feed",
    "fill_block",
    "gaussian_top_k",
    "gelu_mul",
    "head_linear",
    "kv_append",
    "latent_attention",
    "layer_norm",
    "linear",
    "lora_expand",
    "lora_shrink",
    "match_rms",
    "merge_attention",
    "mix",
    "move_slots",
    "op_of",
    "page_slots",
    "paged_attention",
    "paged_choose_positions",
    "partial_attention",
    "pool",
    "qk_norm_rope_append",
    "quant_linear",
    "read_rows",
    "redistribute",
    "reduce_scatter",
    "rms_norm",
    "rope",
    "round_rows",
    "rounded_linear",
    "route",
    "sample",
    "scale_by_position",
    "select_rows",
    "silu_mul",
    "soft_cap",
    "sparse_attention",
    "sparse_mixer",
    "state_copy",
    "state_move",
    "state_zero",
    "step_attention",
    "step_latent_attention",
    "take_block",
    "take_drafts",
    "take_part",
    "top_logprobs",
    "tree_ancestors",
    "tree_positions",
    "vocab_embedding",
    "write_rows",
]
