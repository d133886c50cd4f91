"""The first and last ops of a step on a CPU: `feed` prepares tokens, `sample` chooses, `advance` updates states."""

from collections.abc import Callable
from typing import Any

import torch

from ingot.backends.cpu.calls.kernels import INT, POINTER, Kernels
from ingot.ir import ops
from ingot.ir.ops.penalties import NUM_PENALTIES, Penalties


def step_ops(kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """Return the functions of the ops `feed`, `sample` and `advance`, which begin and end a step.

    Keys of the dict are "ingot.feed" and so on. `feed` makes token ids, positions and cache slots. `sample` draws
    tokens. `advance` stores them in place for the next step.
    """
    return {"ingot.feed": _feed(kernels), "ingot.sample": _sample(kernels), "ingot.advance": _advance(kernels)}


def _feed(kernels: Kernels) -> Callable[..., tuple[torch.Tensor, ...]]:
    function = kernels.one("feed", *[POINTER] * 13, *[INT] * 4)

    def feed(
        tokens: torch.Tensor,
        token_seqs: torch.Tensor,
        q_starts: torch.Tensor,
        q_lens: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        page_table: torch.Tensor | None,
        last_token: torch.Tensor,
        position: torch.Tensor,
        *,
        page_size: int,
    ) -> tuple[torch.Tensor, ...]:
        count = tokens.shape[0]
        ids, positions = tokens.new_empty(count), tokens.new_empty(count)
        slots, kv_lens = tokens.new_empty(count, dtype=torch.int64), q_lens.new_empty(q_lens.shape[0])
        given = (tokens, token_seqs, q_starts, q_lens, rows, starts, page_table, last_token, position)
        results = (ids, positions, slots, kv_lens)
        sizes = (count, q_lens.shape[0], 0 if page_table is None else page_table.shape[1], page_size)
        function(*(None if one is None else one.data_ptr() for one in (*results, *given)), *sizes)
        return results

    return feed


def _sample(kernels: Kernels) -> Callable[..., torch.Tensor]:
    """Return the function that computes the op `sample`.

    The C++ kernel computes steps in which every row is greedy, without penalties or banned tokens. The op's reference
    computes all other steps.
    """
    function = kernels.one("greedy", *[POINTER] * 2, *[INT] * 2)

    def sample(logits: torch.Tensor, temperature: torch.Tensor, *asked: torch.Tensor) -> torch.Tensor:
        if bool(temperature.any()) or Penalties(*asked[-NUM_PENALTIES:]).asked:
            chosen: torch.Tensor = ops.sample.reference(logits, temperature, *asked)
            return chosen
        tokens = logits.new_empty(logits.shape[0], dtype=torch.int32)
        function(tokens.data_ptr(), logits.data_ptr(), *logits.shape)
        return tokens

    return sample


def _advance(kernels: Kernels) -> Callable[..., None]:
    function = kernels.one("advance", *[POINTER] * 7, INT)

    def advance(
        last_token: torch.Tensor,
        position: torch.Tensor,
        rows: torch.Tensor,
        kv_lens: torch.Tensor,
        sampled: torch.Tensor,
        sample_index: torch.Tensor,
        rejected: torch.Tensor | None = None,
    ) -> None:
        given = (last_token, position, rows, kv_lens, sampled, sample_index)
        back = None if rejected is None else rejected.data_ptr()
        function(*(tensor.data_ptr() for tensor in given), back, rows.shape[0])

    return advance
