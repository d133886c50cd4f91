"""One step's inputs on the host: views of one flat buffer, so that a device needs one copy."""

import math
from dataclasses import dataclass

import torch

from ingot.ir.ops.penalties import MAX_BANNED
from ingot.runtime.token_counts import Recount


@dataclass(frozen=True)
class StepSizes:
    """T tokens fed, B sequences, L logit rows, P page-table entries per sequence; each at least 1."""

    T: int
    B: int
    L: int
    P: int


Dims = tuple[str | int, ...]

# name, dtype, shape: what the program takes. The 8-byte field stands first, so that it is aligned wherever the buffer
# is.
STEP_FIELDS: tuple[tuple[str, torch.dtype, Dims], ...] = (
    ("seeds", torch.int64, ("L",)),  # random numbers are keyed by (seed, position)
    ("tokens", torch.int32, ("T",)),  # -1: the row's last sampled token, which the host does not know yet
    ("token_seqs", torch.int32, ("T",)),  # which sequence, 0..B-1
    ("q_starts", torch.int32, ("B",)),  # where in T the sequence begins
    ("q_lens", torch.int32, ("B",)),  # tokens fed of it
    ("rows", torch.int32, ("B",)),  # its device row, 0..max_batch-1
    ("starts", torch.int32, ("B",)),  # position of its first token fed; -1: the device's position[row]
    ("state_read", torch.int32, ("B",)),  # the slot that its per-sequence state is read from; -1: it has none yet
    ("state_write", torch.int32, ("B",)),  # the slot that the state after the step is written to
    ("sample_index", torch.int32, ("B",)),  # its logit row, 0..L-1; -1: no token sampled
    ("prompt_ends", torch.int32, ("B",)),  # its prompt's length, for penalties; -1: its tokens are not counted
    ("page_table", torch.int32, ("B", "P")),  # unused entries 0
    ("logit_rows", torch.int32, ("L",)),  # which of T
    ("temperature", torch.float32, ("L",)),  # 0: greedy
    ("top_k", torch.int32, ("L",)),  # 0: off
    ("top_p", torch.float32, ("L",)),
    ("min_p", torch.float32, ("L",)),
    ("count_rows", torch.int32, ("L",)),  # the device row whose counts penalize it; -1: no penalty
    ("repetition", torch.float32, ("L",)),
    ("frequency", torch.float32, ("L",)),
    ("presence", torch.float32, ("L",)),
    ("banned", torch.int32, ("L", MAX_BANNED)),  # tokens that may not be sampled; -1: none
    ("targets", torch.int32, ("L",)),  # the token whose log-probability is asked for; -1: the sampled one
    ("num_logprobs", torch.int32, ("L",)),  # most likely tokens to list beside it; -1: no log-probabilities
)

# What differs from step to step even while the same sequences decode.
VARYING = frozenset({"page_table", "banned"})


def _shape(dims: Dims, sizes: StepSizes) -> list[int]:
    return [getattr(sizes, dim) if isinstance(dim, str) else dim for dim in dims]


def step_views(flat: torch.Tensor, sizes: StepSizes) -> dict[str, torch.Tensor]:
    """The fields as views of `flat` (i32, one-dimensional, 8-byte aligned, `step_words(sizes)` long or longer).

    The same on the host and on a device that got a copy of `flat`.
    """
    views: dict[str, torch.Tensor] = {}
    offset = 0
    for name, dtype, dims in STEP_FIELDS:
        shape = _shape(dims, sizes)
        words = math.prod(shape) * dtype.itemsize // 4
        views[name] = flat[offset : offset + words].view(dtype).view(shape)
        offset += words
    return views


def step_words(sizes: StepSizes) -> int:
    """4-byte words that `step_views` needs."""
    return sum(math.prod(_shape(dims, sizes)) * dtype.itemsize // 4 for _, dtype, dims in STEP_FIELDS)


class StepInputs(dict[str, torch.Tensor]):
    """The program's inputs by name, on the host: `STEP_FIELDS`, all views of `flat` (i32), which one copy moves.

    `arrays` are the same memory for numpy. `recounts` are rows of token counts that are made anew in front of the step.
    Inputs of equal `stamp`, other than None, differ in `VARYING` alone. Valid until the step has retired; then the
    buffer serves another step.
    """

    def __init__(self, flat: torch.Tensor, sizes: StepSizes) -> None:
        super().__init__(step_views(flat, sizes))
        self.flat = flat
        self.sizes = sizes
        self.arrays = {name: view.numpy() for name, view in self.items()}
        self.recounts: tuple[Recount, ...] = ()
        self.stamp: tuple[bytes, object] | None = None


class StepBuffer:
    """A flat i32 buffer for steps of up to `largest`, allocated once."""

    def __init__(self, largest: StepSizes, pin_memory: bool = False) -> None:
        self._flat = torch.zeros(step_words(largest), dtype=torch.int32, pin_memory=pin_memory)
        self._last: StepInputs | None = None

    def views(self, sizes: StepSizes) -> StepInputs:
        """Inputs of these sizes, to be filled. Contents are those of an older step."""
        if self._last is None or self._last.sizes != sizes:  # decode steps mostly repeat their sizes
            self._last = StepInputs(self._flat[: step_words(sizes)], sizes)
        return self._last
