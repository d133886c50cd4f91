"""Calls of the small kernels of a step, with random arguments, for step.py."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.ir.ops.logit_edits import EditParts

SLOTS, PAGES = 64, 64  # sequences, and entries of the page table: 1024 positions


@dataclass(frozen=True)
class Case:
    """A call of one op to measure. `what` says how it differs from other calls of the op.

    `draw` returns tensors for the op's parameters, in their order. Tables and states are the same tensors each time.
    Other tensors are new. `asked` is the number of bytes that the call moves for options of requests, such as
    penalties. The op itself does not count these bytes.
    """

    op: str
    what: str
    rows: int
    draw: Callable[[], tuple[torch.Tensor, ...]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    asked: int = 0

    @property
    def name(self) -> str:
        what = f"{self.op}, {self.what}" if self.what else self.op
        return f"{what}, {self.rows} row{'s' * (self.rows > 1)}"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that the measured calls depend on.

    `ffn` is the size of the feed-forward block. `heads` is the number of query heads.
    """

    vocab: int
    hidden: int
    ffn: int
    heads: int
    head_dim: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Sizes":
        """Return the sizes of a model with this config.json."""
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
        return Sizes(*(config[name] for name in names))


def cases(sizes: Sizes, rows: int, device: str) -> Iterator[Case]:
    """Yield the op calls to measure in a step with `rows` rows of logits. Their tensors are on `device`."""
    g = torch.Generator(device).manual_seed(rows)
    f32, vocab, hidden = torch.float32, sizes.vocab, sizes.hidden

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g, device=device, dtype=torch.int32)

    def all_of(value: float, dtype: torch.dtype = torch.int32, *shape: int) -> torch.Tensor:
        return torch.full(shape or (rows,), value, dtype=dtype, device=device)

    def logits() -> torch.Tensor:
        """Return random logits [rows, vocab], rounded to bfloat16 as the result of a matmul.

        At least a thousand tokens share most of the probability.
        """
        return (randn(rows, vocab) * 2).to(f32)

    def peaked() -> torch.Tensor:
        """Return random logits [rows, vocab] in which a few dozen tokens have most of the probability."""
        found = logits()
        found[:, ::5003] += 12
        return found

    order = torch.arange(rows, dtype=torch.int32, device=device)
    none, one = all_of(-1), all_of(1)
    table, counts, state = randn(vocab, hidden), whole(3, SLOTS, vocab) * 2, whole(512, SLOTS)
    row = 4 * rows * vocab  # bytes of all logits, or of all counts

    def feed() -> tuple[torch.Tensor, ...]:
        return none, order, order, one, order, none, whole(1000, rows, PAGES), state, state

    yield Case("feed", "decode", rows, feed, {"page_size": 16})
    yield Case("embedding", "", rows, lambda: (whole(vocab, rows), table))
    yield Case("select_rows", "hidden", rows, lambda: (randn(rows, hidden), order))
    yield Case("select_rows", "positions", rows, lambda: (whole(512, rows), order))
    yield Case("advance", "", rows, lambda: (state, state.clone(), order, whole(512, rows), whole(vocab, rows), order))
    yield Case("rms_norm", "hidden", rows, lambda: (randn(rows, hidden), randn(hidden)), {"eps": 1e-5})
    heads, dim = sizes.heads, sizes.head_dim
    yield Case("rms_norm", "heads", rows, lambda: (randn(rows, heads, dim), randn(dim)), {"eps": 1e-5})
    both = lambda: (randn(rows, hidden), randn(rows, hidden), randn(hidden))  # noqa: E731
    yield Case("add_rms_norm", "", rows, both, {"eps": 1e-5})
    yield Case("silu_mul", "", rows, lambda: randn(rows, 2 * sizes.ffn).split(sizes.ffn, 1))
    yield Case("cast", "logits", rows, lambda: (randn(rows, vocab),), {"dtype": f32})
    yield Case("soft_cap", "logits", rows, lambda: (logits(),), {"cap": 30.0})
    for what, prompt_ends in (("nothing asked", none), ("all ask", one)):

        def counted(prompt_ends: torch.Tensor = prompt_ends) -> tuple[torch.Tensor, ...]:
            return counts, whole(vocab, rows), whole(512, rows) + 1, order, order, prompt_ends

        yield Case("count_tokens", what, rows, counted)

    def edited(what: str) -> tuple[torch.Tensor, ...]:
        """Return the arguments of logit edits; without "edited" in the name of a case, no row has any."""
        edits = all_of(-1, torch.int32, SLOTS, EditParts(vocab).words)
        return edits, order if what.endswith("edited") else none, state

    for what, given, temperature, top_k, top_p, min_p in (
        ("greedy", logits, 0.0, 0, 1.0, 0.0),
        ("greedy, penalized", logits, 0.0, 0, 1.0, 0.0),
        ("greedy, edited", logits, 0.0, 0, 1.0, 0.0),
        ("no cut", logits, 1.0, 0, 1.0, 0.0),
        ("min-p", logits, 1.0, 0, 1.0, 0.05),
        ("typical-p", logits, 1.0, 0, 1.0, 0.0),
        ("top-k", logits, 1.0, 50, 1.0, 0.0),
        ("top-p, flat", logits, 1.0, 0, 0.9, 0.0),
        ("top-p, peaked", peaked, 1.0, 0, 0.9, 0.0),
        ("top-k, top-p, flat", logits, 0.7, 20, 0.8, 0.0),
        ("top-k, top-p, peaked", peaked, 0.7, 20, 0.8, 0.0),
    ):
        cuts = (all_of(top_k), all_of(top_p, f32), all_of(min_p, f32), all_of(0.9 if what == "typical-p" else 1.0, f32))
        columns = (all_of(temperature, f32), *cuts, order.long(), order)
        penalized = what.endswith("penalized")
        by = (order if penalized else none, *(all_of(value, f32) for value in (1.1, 0.1, 0.1)))

        def sampled(
            given: Callable[[], torch.Tensor] = given, columns: Any = columns, by: Any = by, what: str = what
        ) -> tuple[torch.Tensor, ...]:
            return given(), *columns, counts, *by, all_of(-1, torch.int32, rows, 16), *edited(what)

        # It reads counts, and writes logits and reads them.
        yield Case("sample", what, rows, sampled, asked=2 * row * (penalized or what.endswith("edited")))
    for what, count in (("nothing asked", -1), ("chosen alone", 0), ("20 tokens", 20)):

        def scored(count: int = count) -> tuple[torch.Tensor, ...]:
            return logits(), whole(vocab, rows), none, all_of(count)

        yield Case("top_logprobs", what, rows, scored, asked=row * (count >= 0))  # it reads logits
