"""Conditions of passes that replace matmuls and attention where steps have many tokens, on a GPU."""

from torch import fx

from ingot.ir.artifact.plan import GPU_FEW_TOKENS
from ingot.ir.program import tensor_type
from ingot.passes.base import PassContext


def has_many_tokens(context: PassContext) -> bool:
    """Return whether the bucket class (a range of step sizes) has steps of many tokens, on a GPU.

    It is false in deterministic mode. There, one row has the same bits in steps of all sizes, so few tokens and many
    need one lowering.
    """
    bucket = context.any_bucket()
    return context.target.device == "cuda" and bucket.tokens[1] > GPU_FEW_TOKENS and not bucket.batch_invariant


def why_few_rows(x: fx.Node) -> str:
    """Return why `x`, an activation, may have few rows in a step of many tokens; "" if a row is a token."""
    rows = tensor_type(x).shape[0]
    return "" if rows == "T" else f"x has {rows} rows, which may be few in a step of many tokens"
