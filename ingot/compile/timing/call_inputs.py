"""Make the workload that a call is timed on: typical steps of its bucket class, and random inputs of its shapes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass
from ingot.ir.cache.dtype import is_narrow
from ingot.ir.errors import BackendError
from ingot.ir.features.sharing import COLUMNS
from ingot.ir.ops.stand_ins import rows_of_part
from ingot.ir.program import Program, held_type, named_values
from ingot.ir.types import TensorType

# The cached positions of a sequence in a step of one token per sequence: those of a chat.
_DECODED_CONTEXT = 1024
_PROMPTS = 4  # sequences in the shorter step of prompts


@dataclass(frozen=True)
class TimedStep:
    """The size of a step in which a call is timed: `tokens` new tokens of `sequences` sequences.

    Each sequence attends to `context` positions, including those of the step.
    """

    tokens: int
    sequences: int
    context: int


def timed_steps(body: Program) -> tuple[TimedStep, ...]:
    """Return the step sizes in which to time the call in `body`, typical for its bucket class (range of step sizes).

    Decode classes have one. Other classes have two: several short prompts, and one long prompt of half the largest
    step.
    """
    bucket = body.bucket or BucketClass(name="any", tokens=(1, body.dims["T"].hi if "T" in body.dims else 1))
    low, high = bucket.tokens
    most = body.dims["B"].hi if "B" in body.dims else high
    page = _page_size(body)
    longest = body.dims["P"].hi * page if page and "P" in body.dims else high
    if bucket.q_max == 1 or high <= GPU_FEW_TOKENS:
        tokens = min((low + high + 1) // 2, most)
        return (TimedStep(tokens, tokens, min(_DECODED_CONTEXT, longest)),)
    found = []
    for tokens, sequences in ((math.isqrt(low * high), _PROMPTS), (max(low, high // 2), 1)):
        sequences = min(most, max(sequences, -(-tokens // longest)))
        each = min(max(1, tokens // sequences), longest)
        found.append(TimedStep(each * sequences, sequences, each))
    return tuple(dict.fromkeys(one for one in found if low <= one.tokens <= high))


def call_of(body: Program) -> fx.Node:
    """Return the only call of a program."""
    return next(iter(body.calls()))


def inputs_for(body: Program, step: TimedStep, device: str, generator: torch.Generator) -> list[torch.Tensor]:
    """Return a tensor for each placeholder of `body`, in order, for a step of this size.

    Floats are random, and integers fit the step. Raises BackendError for an integer input that a step does not define.
    """
    sizes = _sizes(body, step)
    integers = _integers(step, sizes, _page_size(body), generator)
    names = _parameters(body)
    made: list[torch.Tensor] = []
    for node in body.placeholders():
        wanted = held_type(node)
        if wanted.dtype.is_floating_point or is_narrow(wanted.dtype):
            made.append(_random(wanted, sizes, device, generator))
        elif (value := integers.get(names.get(node, ""))) is not None and value.shape == wanted.bind(sizes):
            made.append(value.to(device, wanted.dtype))
        else:
            raise BackendError(
                f"steps do not define the input '{names.get(node, node.name)}'", where=f"{wanted}, timing a call"
            )
    return made


def _parameters(body: Program) -> dict[fx.Node, str]:
    call = call_of(body)
    return {value: name for name, value in named_values(call).items()}


def _page_size(body: Program) -> int:
    """Return the number of positions in a KV cache page, or 0 if the call has no paged cache."""
    for spec in body.states.values():
        if spec.kind == "paged_kv":
            size = spec.type.shape[2]
            assert isinstance(size, int)
            return size
    return 0


def _sizes(body: Program, step: TimedStep) -> dict[str, int]:
    pages = -(-step.context // (_page_size(body) or 1))
    known = {"T": step.tokens, "B": step.sequences, "L": step.sequences, "P": pages}
    if "T_tp" in body.dims and body.bucket is not None:
        # The body of a call names no mesh. The bounds show the number of ranks, or fewer in classes of few tokens, such
        # as 3 of 4 for 9 tokens. A rank has no more rows than the bound.
        ranks, most = -(-body.bucket.tokens[1] // body.dims["T_tp"].hi), body.dims["T_tp"].hi
        known["T_tp"] = min(rows_of_part(step.tokens, ranks), most)
    return {**known, "R": step.sequences, "S": step.sequences, "pages": pages * step.sequences, "G": 1}


def _random(wanted: TensorType, sizes: Mapping[str, int], device: str, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of normally distributed values.

    Zeros would take less power, and the GPU would run faster than with real values.
    """
    shape = wanted.bind(sizes)
    strides = wanted.strides or torch.empty(shape, device="meta").stride()
    made = torch.empty_strided(shape, strides, dtype=wanted.dtype, device=device)
    if is_narrow(wanted.dtype):  # torch cannot draw in these dtypes
        size = 1 if wanted.dtype.is_floating_point else 32  # i8 holds whole numbers up to 127
        return made.copy_(size * torch.randn(shape, device=device, generator=generator))
    return made.normal_(generator=generator)


def _integers(
    step: TimedStep, sizes: Mapping[str, int], page: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return the integer inputs of a step, such as positions and page tables, by parameter name.

    `page` is the number of positions in a page, or 0 without a paged cache. The pages of a sequence are consecutive, as
    the pool allocates them. Prefill attention then loads a tile of them at once (docs/gpu-kernels.md).
    """
    fed = step.tokens // step.sequences
    sequence = torch.arange(step.sequences).repeat_interleave(fed)
    positions = torch.arange(fed).repeat(step.sequences) + step.context - fed
    found = {
        "positions": positions,
        "token_seqs": sequence,
        "q_starts": torch.arange(step.sequences) * fed,
        "q_lens": torch.full((step.sequences,), fed),
        "kv_lens": torch.full((step.sequences,), step.context),
        "rows": torch.arange(step.sequences) * fed,
        "sharing": torch.zeros(1, COLUMNS),
    }
    if page:
        table = torch.arange(sizes["pages"]).view(step.sequences, sizes["P"])
        found["page_table"] = table
        found["slots"] = table[sequence, positions // page] * page + positions % page
    return found
