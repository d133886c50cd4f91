"""The data of one sequence while it is served: its tokens, its progress, and what it holds."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from ingot.runtime.engines.outputs import FinishReason
from ingot.runtime.grammar.matcher import Matcher
from ingot.runtime.pages.block_hashes import BlockHashes
from ingot.runtime.params.logit_edits import LogitEdits
from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.detokenizer import Detokenizer

INVALID_TOKEN = -1  # an executor's token for a row with non-finite logits
NOT_FINITE = "the model returned numbers that are not finite"  # the stop_reason of a sequence that ends by this


class Status(enum.Enum):
    WAITING = "waiting"  # new, or preempted
    RUNNING = "running"  # has a device row
    FINISHED = "finished"


class End(NamedTuple):
    """Why a sequence ended. `reason` is as in `CompletionOutput.finish_reason`. `stop` is the stop string, the stop
    token or the text of an error that ended it; else None."""

    reason: FinishReason
    stop: int | str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """The part of a sequence that comes from the caller's request and never changes.

    request_id      the id of this sequence, not of the caller's request
    prompt_ids      the tokens of the prompt
    params          the sampling or pooling parameters
    eos_ids         the model's end tokens
    scores_prompt   whether this sequence computes the prompt_logprobs of its request; of n sequences, only the first
                    does
    cache_salt      only sequences with an equal salt share cached pages
    adapter_key     identifies the LoRA adapter, which changes keys and values; empty: it uses none
    priority        sequences with lower numbers are served first
    streamed        the caller takes each token as soon as it is sampled; False: all at the end
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams | PoolingParams
    eos_ids: frozenset[int] = frozenset()
    scores_prompt: bool = False
    cache_salt: bytes = b""
    adapter_key: bytes = b""
    priority: int = 0
    streamed: bool = True

    def model_ends(self) -> frozenset[int]:
        """Return the model's end tokens. With `ignore_eos`, return an empty set, because they do not end the
        sequence."""
        return frozenset() if self.params.ignore_eos else self.eos_ids

    def end_tokens(self) -> frozenset[int]:
        """Return the ids of all tokens that end the sequence: the model's end tokens (none with `ignore_eos`), and the
        request's stop tokens."""
        return self.model_ends() | frozenset(self.params.stop_token_ids)


@dataclass(slots=True)
class Cached:
    """The fields of a sequence that only the prefix cache uses.

    hashes      the hashes of the sequence's full blocks of tokens; None: the cache is off
    branch      with per-sequence states, such as Mamba's: how many first tokens had cached pages at admission. If no
                state was cached there, a prompt chunk ends there, so that the state can be kept
    generated   the digest of the state that is kept after a page of generated tokens; None: there is none
    num_kept    how many of the sequence's first pages are registered, so that other sequences can find them
    num_found   the number of cached tokens when the sequence was first admitted; None before
    num_lost    the number of computed tokens when the sequence was last preempted
    """

    hashes: BlockHashes | None = None
    branch: int = 0
    generated: bytes | None = None
    num_kept: int = 0
    num_found: int | None = None
    num_lost: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """One sequence while it is served: its tokens, its progress, its KV pages. Only the scheduler changes it.

    given           the sequence's part of the caller's request
    seed            seeds the sequence's random numbers, together with the position
    edits           changes of its logits, such as biases; None: none
    matcher         follows its output through its grammar; None: it has none
    adapter_slot    the slot of its LoRA adapter in the states on the device; -1: it uses none
    text            turns the output into text and finds stop strings; None without a tokenizer
    rank            the place in the order of requests, lowest first; set when the sequence is queued
    max_total       the most tokens it may have, prompt and output together; set when the sequence is queued
    output_ids      the tokens that it has generated
    status          waiting, running or finished
    row             its device row (an index in the per-sequence tensors on the device) while it runs; else -1
    pages           for each cache group, its pages in the order of positions; a cache group is KV caches that share one
                    page table
    given_back      for each cache group, how many of its first pages it has freed
    state_read      with per-sequence states (Mamba): the slot of the state that its next step reads; -1: none
    state_write     with per-sequence states (Mamba): the slot of the state that its next step writes; -1: none
    state_at        `num_computed` when it got these two slots; -1: a step has written `state_write` since
    num_scored      for prompt_logprobs: how many prompt positions have log-probabilities, counting steps in flight
    num_computed    how many of its tokens have keys and values, counting steps in flight. With drafts it is the largest
                    possible number
    in_flight       the most tokens that steps in flight may sample for it
    sampled_by      the number of the newest step that samples a token for it, or of a later one that was withdrawn
    miscounted      the token counts in its device row, which penalties use, lack the tokens computed so far
    denoises        block diffusion: its device row holds the block that is being generated
    preemptions     how often it was preempted
    decodes_until   the scheduler does not check it while `num_computed` is below this
                    (`ingot.runtime.scheduling.steady_decode`)
    looks_at        the scheduler checks each new token once it has this many outputs, because a block of tokens may be
                    full or the sequence may end
    ends            the tokens that end it, including INVALID_TOKEN; set when the sequence is queued
    cached          the fields that the prefix cache uses
    end             why it ended; None while it runs
    """

    given: Given
    seed: int = 0
    edits: LogitEdits | None = None
    matcher: Matcher | None = None
    adapter_slot: int = -1
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
    sampled_by: int = -1
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
    def takes_drafts(self) -> bool:
        """Whether speculative steps may run for it. Not with penalties, a grammar or bad words of several tokens, which
        change the logits after each token."""
        changes = self.matcher is not None or (self.edits is not None and bool(self.edits.words))
        return not (self.params.penalizes or changes)

    @property
    def takes_forced(self) -> bool:
        """Whether several tokens that its grammar forces may run in one step. Not with log-probabilities, which need a
        row of logits for each token, or with other limits on tokens, which may forbid a token that the grammar
        forces."""
        params, edits = self.params, self.edits
        limited = edits is not None and (edits.limits or bool(edits.words))
        return isinstance(params, SamplingParams) and params.logprobs is None and not limited

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def num_known(self) -> int:
        """The number of tokens that the host knows: the prompt and the outputs so far. Tokens that steps in flight
        sample do not count."""
        return len(self.given.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """The number of prompt and output tokens. Tokens that steps in flight will sample count too. With drafts, this
        is the largest possible number."""
        return len(self.given.prompt_ids) + len(self.output_ids) + self.in_flight

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Return the token ids at positions start..stop-1 of prompt and output. The host must know all of them. It does
        not know tokens that a step in flight samples."""
        prompt = self.given.prompt_ids
        if stop <= (prompt_len := len(prompt)):
            return prompt[start:stop]
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : stop - prompt_len]
        return prompt[start:] + self.output_ids[: stop - prompt_len]

    def scored_in(self, start: int, stop: int) -> range:
        """Return the positions in start..stop-1 from which a step must compute prompt_logprobs. The logits at a
        position give the log-probability of the next prompt token. Positions of earlier steps are left out."""
        if not self.given.scores_prompt:
            return range(0)
        first = max(start, self.num_scored)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))

    def end_tokens(self) -> frozenset[int]:
        """Return the ids of all tokens that end the sequence: the model's end tokens (none with `ignore_eos`), and the
        request's stop tokens."""
        return self.given.end_tokens()

    def look(self, token: int) -> None:
        """Add the newest output, `token`, to the text, and set `end` if the sequence ends here. It ends at an end
        token, a stop string, the length limit or an invalid token."""
        if token == INVALID_TOKEN:
            self.output_ids.pop()
            self.stop(End("error", NOT_FINITE))
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
        """End the sequence for a reason other than a generated token, such as an abort."""
        if self.text is not None and self.end is None:
            self.text.finish()
        self.end = end
