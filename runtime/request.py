"""The data of one sequence while it is served: its tokens, its progress, and what it holds."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from ingot.runtime.block_hashes import BlockHashes
from ingot.runtime.detokenizer import Detokenizer
from ingot.runtime.outputs import FinishReason
from ingot.runtime.pooling_params import PoolingParams
from ingot.runtime.sampling_params import SamplingParams

INVALID_TOKEN = -1  # an executor's token for a row with non-finite logits


class Status(enum.Enum):
    WAITING = "waiting"  # new, or preempted
    RUNNING = "running"  # has a device row
    FINISHED = "finished"


class End(NamedTuple):
    """Why a sequence ended. `stop` is the stop string or stop token that ended it, or the text of an error, or None."""

    reason: FinishReason
    stop: int | str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """The part of a sequence that comes from the caller's request and never changes.

    request_id     the id of this sequence, not that of the caller's request
    eos_ids        the model's end tokens
    scores_prompt  this sequence computes the prompt_logprobs of its request (of n sequences, the first does)
    cache_salt     only requests with the same salt share cached pages
    priority       the lower, the sooner it is served
    streamed       the caller takes each token as soon as it is sampled, instead of all at the end
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams | PoolingParams
    eos_ids: frozenset[int] = frozenset()
    scores_prompt: bool = False
    cache_salt: bytes = b""
    priority: int = 0
    streamed: bool = True

    def model_ends(self) -> frozenset[int]:
        """Return the model's end tokens; none with `ignore_eos`."""
        return frozenset() if self.params.ignore_eos else self.eos_ids

    def end_tokens(self) -> frozenset[int]:
        """Return the tokens that end the sequence: the model's, unless ignored, and the request's stop tokens."""
        return self.model_ends() | frozenset(self.params.stop_token_ids)


@dataclass(slots=True)
class Cached:
    """The fields of a sequence that only the prefix cache uses.

    hashes      the hashes of its full blocks of tokens; None: the cache is off
    branch      the number of its first tokens whose pages were cached; if no state was, a chunk ends there to keep one
    generated   the digest of the state that the cache keeps after its generated tokens; None: it keeps none
    num_kept    how many of its first pages others can find
    num_found   the number of cached tokens when it was first admitted; None before
    num_lost    the number of tokens with keys and values when it was last preempted
    """

    hashes: BlockHashes | None = None
    branch: int = 0
    generated: bytes | None = None
    num_kept: int = 0
    num_found: int | None = None
    num_lost: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """One sequence while it is served: its tokens, its progress, its pages and slots. Only the scheduler changes it.

    given          what the caller's request says about it
    seed           seeds its random numbers, together with the position
    text           turns its output into text and finds stop strings; None without a tokenizer
    rank           its place in the order of waiting and of running requests, lowest first; set when it is added
    max_total      the most tokens it may have, prompt and output together; set when it is added
    output_ids     the tokens that it has generated
    row            its device row while it runs, else -1
    pages          for each cache group its KV pages, in the order of positions
    given_back     for each cache group, how many of its first pages it has freed
    state_read     the state slot that its next step reads, which it holds; -1: none
    state_write    the state slot that its next step writes, which it holds; -1: none
    state_at       num_computed when it got these two slots; -1: a step has written `state_write` since
    num_scored     the prompt positions with log-probabilities, from steps that ran or are in flight
    num_computed   tokens whose keys and values are written, or will be by a step in flight; an upper bound, because the
                   host does not know how many drafts in flight are accepted
    in_flight      the most tokens that steps in flight may sample for it
    miscounted     it uses penalties, and the token counts of its device row lack the tokens computed so far
    denoises       its device row holds the block that it is denoising
    preemptions    how often it was preempted
    decodes_until  the scheduler need not check it while num_computed is below this (`ingot.runtime.steady_decode`)
    looks_at       the number of outputs at which a block of tokens is full or the sequence may end
    ends           the tokens that end it, including INVALID_TOKEN; set when it is added
    cached         the fields that the prefix cache uses
    end            why it ended; None while it runs
    """

    given: Given
    seed: int = 0
    text: Detokenizer | None = None
    rank: tuple[int, int] = (0, 0)
    max_total: int = 0
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    row: int = -1
    pages: list[list[int]] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    state_read: int = -1
    state_write: int = -1
    state_at: int = -1
    num_scored: int = 0
    num_computed: int = 0
    in_flight: int = 0
    miscounted: bool = False
    denoises: bool = False
    preemptions: int = 0
    decodes_until: int = 0
    looks_at: int = 0
    ends: frozenset[int] = frozenset()
    cached: Cached = field(default_factory=Cached)
    end: End | None = None

    @property
    def request_id(self) -> str:
        return self.given.request_id

    @property
    def prompt_ids(self) -> list[int]:
        return self.given.prompt_ids

    @property
    def params(self) -> SamplingParams | PoolingParams:
        return self.given.params

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def num_known(self) -> int:
        """The number of tokens that the host knows: the prompt and the outputs so far."""
        return len(self.given.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including the most that steps in flight may sample."""
        return len(self.given.prompt_ids) + len(self.output_ids) + self.in_flight

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Return the ids of the prompt and output tokens at positions start..stop-1. The host must know them
        already."""
        prompt = self.given.prompt_ids
        if stop <= (prompt_len := len(prompt)):
            return prompt[start:stop]
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : stop - prompt_len]
        return prompt[start:] + self.output_ids[: stop - prompt_len]

    def scored_in(self, start: int, stop: int) -> range:
        """Return the positions in start..stop-1 at which a step must compute the log-probability of the next prompt
        token. Positions that an earlier step has done are left out."""
        if not self.given.scores_prompt:
            return range(0)
        first = max(start, self.num_scored)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))

    def end_tokens(self) -> frozenset[int]:
        """Return the ids of the tokens that end the sequence: the model's, unless ignored, and the request's stop
        tokens."""
        return self.given.end_tokens()

    def look(self, token: int) -> None:
        """Add the last output, `token`, to the text, and set `end` if the token or a stop string ends the sequence.
        Only this method decides that."""
        if token == INVALID_TOKEN:
            self.output_ids.pop()
            self.stop(End("error"))
            return
        end = None
        if token in self.ends:
            end = End("stop", None if token in self.given.model_ends() else token)
        elif self.num_known >= self.max_total:
            end = End("length")
        text = self.text
        if text is not None:
            if end is None or end.reason != "stop" or self.params.include_stop_str_in_output:
                text.push(token)
            if end is not None:
                text.finish()
            if text.matched is not None:
                end = End("stop", text.matched)
        self.end = end

    def stop(self, end: End) -> None:
        """End the sequence for a reason other than its tokens, such as an abort."""
        if self.text is not None and self.end is None:
            self.text.finish()
        self.end = end
