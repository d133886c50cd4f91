"""The state of one sequence while it is served."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from ingot.runtime.block_hashes import BlockHashes
from ingot.runtime.detokenizer import Detokenizer
from ingot.runtime.outputs import FinishReason
from ingot.runtime.pooling_params import PoolingParams
from ingot.runtime.sampling_params import SamplingParams

INVALID_TOKEN = -1  # what an executor gives for a row whose logits were not finite


class Status(enum.Enum):
    WAITING = "waiting"  # new, or preempted
    RUNNING = "running"  # has a device row
    FINISHED = "finished"


class End(NamedTuple):
    """Why a sequence ended: `FinishReason`, and the stop string, the stop token, or what was missing."""

    reason: FinishReason
    stop: int | str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What a caller gave.

    eos_ids        the model's end tokens
    scores_prompt  its prompt's log-probabilities are asked for, and no other sequence of the same prompt gives them
    cache_salt     keeps its cached pages to requests of the same salt
    priority       the lower, the sooner it is served
    streamed       its caller takes each token as it comes, and not all of them together
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
        """The model's own tokens that end the sequence."""
        return frozenset() if self.params.ignore_eos else self.eos_ids

    def end_tokens(self) -> frozenset[int]:
        """The tokens that end the sequence: the model's own, unless they are ignored, and the request's."""
        return self.model_ends() | frozenset(self.params.stop_token_ids)


@dataclass(slots=True)
class Cached:
    """What a sequence has to do with the prefix cache.

    hashes      of its full blocks; None where it shares no pages
    branch      tokens after which a state is to be kept: others have their pages, and none a slot
    generated   names the state that it has kept after tokens of its own
    num_kept    pages in front that others can find
    num_found   tokens that it found when it was first admitted; None before
    num_lost    tokens whose KV it had when it was last preempted
    """

    hashes: BlockHashes | None = None
    branch: int = 0
    generated: bytes | None = None
    num_kept: int = 0
    num_found: int | None = None
    num_lost: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """One sequence: its tokens, where it stands, what it holds. Changed by the scheduler alone.

    seed           keys the random numbers, with the position
    text           the text of its outputs, whose stop strings end it; None without a tokenizer
    rank           the order of those that wait and of those that run; set when it is added
    max_total      most tokens, prompt and output together; set when it is added
    row            its device row while it runs, else -1
    pages          its KV pages in each group of caches, in the order of positions; see `ingot.runtime.sequence_pages`
    given_back     by group of caches, so many places in front hold no page any more
    state_read     the slot that its next step reads, and that it holds; -1: none. See `ingot.runtime.state_slots`
    state_write    the slot that its next step writes; -1: the model has no such state, or the sequence no row
    state_at       where it stood when it got these two; -1: it has written its slot since
    num_scored     positions of the prompt that have log-probabilities, from a step that ran or is in flight
    num_computed   tokens whose KV is written or being written by a step in flight, at most: of drafts that a step in
                   flight feeds it is not known how many are kept
    in_flight      tokens to come from steps in flight, at most
    miscounted     penalties ask for its tokens, and its row does not count those that are computed
    denoises       its row holds the block that it is denoising
    preemptions    how often its pages were taken away
    decodes_until  see `ingot.runtime.steady_decode`
    looks_at       outputs with which a block is full or the sequence may end; set when it is added
    ends           the tokens that end it, INVALID_TOKEN among them; set when it is added
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
        """Tokens whose ids the host knows: the prompt and the outputs so far."""
        return len(self.given.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """All tokens, those in flight included."""
        return len(self.given.prompt_ids) + len(self.output_ids) + self.in_flight

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start..stop-1, all of them known."""
        prompt = self.given.prompt_ids
        if stop <= (prompt_len := len(prompt)):
            return prompt[start:stop]
        if start >= prompt_len:
            return self.output_ids[start - prompt_len : stop - prompt_len]
        return prompt[start:] + self.output_ids[: stop - prompt_len]

    def scored_in(self, start: int, stop: int) -> range:
        """The positions in start..stop-1 whose logits rate the prompt's next token, and which no step has rated."""
        if not self.given.scores_prompt:
            return range(0)
        first = max(start, self.num_scored)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))

    def end_tokens(self) -> frozenset[int]:
        """The tokens that end the sequence."""
        return self.given.end_tokens()

    def look(self, token: int) -> None:
        """Set `end` where the sequence ends with `token`, its last output: here and nowhere else is it decided that a
        sequence has come to its end."""
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
        """End the sequence for a reason that no token of its own gives."""
        if self.text is not None and self.end is None:
            self.text.finish()
        self.end = end
