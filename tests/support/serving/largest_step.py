"""The step that a plan is sized by, and what it allocates.

Measured is what goes through torch's CPU allocator, which its profiler reports call by call: values, temporaries of
references and of compiled regions, and the scratch that oneDNN asks torch for. Weights, states and inputs are there
before. The allocator's count is exact and the same on a busy machine; what the process holds beyond it (malloc's
rounding, code, threads) shows in its peak resident size, which the test of the larger model measures.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.profiler import profile

from ingot.ir.logprob_limits import MAX_LOGPROBS, MAX_SCORED
from ingot.ir.ops.penalties import MAX_BANNED
from ingot.runtime.loading.limits import Limits
from ingot.runtime.loading.loader import Loaded


def largest_step(loaded: Loaded, tokens: int | None = None) -> dict[str, torch.Tensor]:
    """`tokens` (default: all that fit), every sequence with a row of logits, penalized and none of them greedy, and as
    many more rows that score a prompt as a step may have, all with log-probabilities.

    The first sequence feeds what the others leave and ends at its full length; the others feed one token. It is its
    prompt that is scored.
    """
    limits = loaded.limits
    sequences = limits.max_batch
    tokens = tokens or limits.max_tokens
    first = min(tokens - (sequences - 1), limits.max_seq_len)
    lengths = [first] + [1] * (sequences - 1)
    width = -(-limits.max_seq_len // limits.page_size)
    table = torch.zeros(sequences, width, dtype=torch.int32)
    table[0] = torch.arange(width)
    table[1:, 0] = width + torch.arange(sequences - 1)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    ends = list(itertools.accumulate(lengths))
    scored = min(MAX_SCORED, first - 1)
    rows = sequences + scored
    drawn = torch.arange(rows) < sequences
    return {
        "tokens": ints([index % limits.vocab_size for index in range(sum(lengths))]),
        "token_seqs": ints([index for index, length in enumerate(lengths) for _ in range(length)]),
        "q_starts": ints([end - length for end, length in zip(ends, lengths, strict=True)]),
        "q_lens": ints(lengths),
        "rows": ints(list(range(sequences))),
        "starts": ints([limits.max_seq_len - first] + [0] * (sequences - 1)),
        "sample_index": ints(list(range(sequences))),
        "page_table": table,
        "prompt_ends": ints([limits.max_seq_len] * sequences),
        "logit_rows": ints([*(end - 1 for end in ends), *range(scored)]),
        "temperature": drawn.float(),
        "top_k": torch.where(drawn, 50, 0).int(),
        "top_p": torch.where(drawn, 0.9, 1.0),
        "min_p": torch.where(drawn, 0.05, 0.0),
        "typical_p": torch.where(drawn, 0.9, 1.0),
        "seeds": torch.arange(rows),
        "count_rows": torch.where(drawn, torch.arange(rows), -1).int(),
        "repetition": torch.where(drawn, 1.2, 1.0),
        "frequency": torch.where(drawn, 0.5, 0.0),
        "presence": torch.where(drawn, 0.5, 0.0),
        "banned": torch.full((rows, MAX_BANNED), -1, dtype=torch.int32),
        "edit_rows": torch.where(drawn, torch.arange(rows), -1).int(),
        "targets": torch.where(drawn, -1, 7).int(),
        "num_logprobs": ints([MAX_LOGPROBS] * rows),
    }


def pages_of(limits: Limits) -> int:
    """KV pages that `largest_step` touches: a sequence at full length, and one of each other sequence."""
    return -(-limits.max_seq_len // limits.page_size) + limits.max_batch - 1


def allocated(call: Callable[[], Any]) -> int:
    """Bytes that `call` holds at once at most, of what it allocates itself, its result among them."""
    with profile(use_cpu=True, profile_memory=True) as seen:
        kept = call()
    del kept
    changes = [event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes), default=0)


def allocated_by_step(loaded: Loaded, inputs: Mapping[str, torch.Tensor]) -> int:
    """Bytes that one launch holds at once at most."""
    return allocated(lambda: loaded.executor.launch(inputs).outputs)
