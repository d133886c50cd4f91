"""Decode steps of DeepSeek-V3.2's sparse attention: the indexer's choice, and attention over the chosen latents.

`latents.py` measures them. The indexer reads the keys of all positions, and attention only the rows that are chosen.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from device_times import Recorded, check, take_turns
from kernel_figures import Call, slug

from ingot.backends.triton.lower.call import Call as Lowered
from ingot.backends.triton.lower.table import LOWERINGS
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Launcher, Machine, captured
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.ops import OPS
from ingot.ir.types import DTYPES, TensorType

CHOOSE, ATTEND = "paged_choose_positions", "sparse_attention"
_STEPS = 4  # steps in a graph: together they read more than ten times what the last-level cache of an H200 holds
_SYMBOLS = {"q": "T", "weights": "T", "chosen": "T", "keys": "pages", "kv": "pages"}


@dataclass(frozen=True)
class SparseStep:
    """A decode step: sequences of these `contexts`, `heads` q heads of latent attention, and an indexer.

    A token chooses `top_k` positions. The indexer has `index_heads` queries and keys of `index_width` elements. A row
    of the cache has `latent` elements that are keys and values, and `rotated` more of the key.
    """

    contexts: tuple[int, ...]
    heads: int
    top_k: int = 2048
    index_heads: int = 64
    index_width: int = 128
    latent: int = 512
    rotated: int = 64
    page: int = 16
    dtype: str = "bf16"
    bucket: tuple[int, int] = (17, 32)

    def attributes(self, op: str) -> Mapping[str, Any]:
        if op == CHOOSE:
            return {"top_k": self.top_k}
        return {"scale": (self.latent + self.rotated) ** -0.5, "value_width": self.latent}

    def call(self, op: str, what: str) -> Call:
        """Return the call of an op, with the bytes and operations that it cannot avoid.

        Bytes are those of keys or chosen rows, queries, weights, chosen positions and results.
        """
        size, count, positions = DTYPES[self.dtype].itemsize, len(self.contexts), sum(self.contexts)
        listed = sum(min(self.top_k, one) for one in self.contexts)
        if op == CHOOSE:
            moved = (positions + count * self.index_heads) * self.index_width * size
            moved += count * 4 * (self.index_heads + self.top_k)
            return Call(slug(what), what, moved, 2 * positions * self.index_heads * self.index_width)
        row = self.latent + self.rotated
        moved = (listed * row + count * self.heads * (row + self.latent)) * size + 4 * count * self.top_k
        return Call(slug(what), what, moved, 2 * listed * self.heads * (row + self.latent))


def inputs_of(step: SparseStep, op: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the inputs of `_STEPS` calls by name, in the op's order. Each call reads pages of its own.

    Numbers of the indexer are whole, so that scores are exact in any order, and results can be compared as bits.
    """
    generator = torch.Generator(device.DEVICE).manual_seed(1)
    options: dict[str, Any] = {"generator": generator, "device": device.DEVICE}
    needed = [-(-length // step.page) for length in step.contexts]
    count, pages = len(step.contexts), sum(needed)
    width = step.index_width if op == CHOOSE else step.latent + step.rotated
    shape = (_STEPS * pages, 1, step.page, 1, width)
    dtype = DTYPES[step.dtype]
    cache = torch.empty(shape, dtype=dtype, device=device.DEVICE)
    for part in cache.split(1 << 12):
        drawn = torch.randint(-2, 3, part.shape, **options) if op == CHOOSE else torch.randn(part.shape, **options)
        part.copy_(drawn)
    order = torch.randperm(len(cache), **options).int()
    totals = torch.tensor(step.contexts, dtype=torch.int32, device=device.DEVICE)
    starts = torch.arange(count, dtype=torch.int32, device=device.DEVICE)
    for own in order.split(pages):
        table = torch.nn.utils.rnn.pad_sequence(list(own.split(needed)), batch_first=True)
        rows = {"page_table": table, "q_starts": starts, "q_lens": torch.ones_like(starts)}
        if op == CHOOSE:
            q = torch.randint(-2, 3, (count, step.index_heads, width), **options).to(dtype)
            weights = torch.randint(-2, 3, (count, step.index_heads), **options).float()
            yield {"q": q, "keys": cache, "weights": weights, **rows, "kv_lens": totals}
            continue
        chosen = torch.full((count, step.top_k), -1, dtype=torch.int32, device=device.DEVICE)
        for row, length in zip(chosen, step.contexts, strict=True):
            listed = torch.randperm(length, **options)[: step.top_k].sort().values
            row[: len(listed)] = listed
        q = torch.randn(count, step.heads, width, **options).to(dtype)
        yield {"q": q, "kv": cache, "chosen": chosen, **rows}


def measure(machine: Machine, step: SparseStep, op: str) -> dict[str, list[float]]:
    """Return the seconds of one call in each round of measurement. Raises RuntimeError for wrong results."""
    inputs = list(inputs_of(step, op))
    bucket = BucketClass(name="measured", tokens=step.bucket, q_max=1)
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    values = {name: Value(_typed(name, tensor), input=place) for place, (name, tensor) in enumerate(inputs[0].items())}
    expected = OPS[op].reference(*inputs[-1].values(), **step.attributes(op))
    result = TensorType(expected.dtype, ("T", *expected.shape[1:]))
    (made,) = LOWERINGS[op](Lowered(op, values, step.attributes(op), (result,)), schedule)
    count = len(step.contexts)
    sizes = {"T": count, "B": count, "P": inputs[0]["page_table"].shape[1]}
    call = Launcher(schedule, made, sizes)
    given = [list(one.values()) for one in inputs]
    call(given[-1])  # compiles outside the recording
    recorded = Recorded(captured(partial(call, one) for one in given), len(given), (inputs, call))
    if op == CHOOSE:
        call.output.fill_(-7)
        recorded.graph.replay()
        if not torch.equal(call.output, expected):
            raise RuntimeError("the result is wrong by other positions")
    else:
        check(recorded, call.output, expected.float())
    return take_turns({"triton": recorded})


def _typed(name: str, tensor: torch.Tensor) -> TensorType:
    if name == "page_table":
        return TensorType(tensor.dtype, ("B", "P"))
    return TensorType(tensor.dtype, (_SYMBOLS.get(name, "B"), *tensor.shape[1:]))
