"""The state of one sequence while it is served."""

import enum
from dataclasses import dataclass, field

from ingot.runtime.block_hashes import BlockHashes
from ingot.runtime.outputs import FinishReason
from ingot.runtime.sampling_params import SamplingParams

INVALID_TOKEN = -1  # what an executor gives for a row whose logits were not finite


class Status(enum.Enum):
    WAITING = "waiting"  # new, or preempted
    RUNNING = "running"  # has a device row
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One sequence: its tokens, where it stands, what it holds. Changed by the scheduler alone.

    seed           keys the random numbers, with the position
    eos_ids        the model's end tokens
    cache_salt     keeps its cached pages to requests of the same salt
    priority       the lower, the sooner it is served
    streamed       somebody waits for each of its tokens, and not for all of them together
    rank           who comes first, of those that wait and of those that run; set when it is added
    max_total      most tokens, prompt and output together; set when it is added
    row            its device row while it runs, else -1
    pages          its KV pages, in the order of positions
    scores_prompt  its prompt's log-probabilities are asked for, and no other sequence of the same prompt gives them
    num_scored     positions of the prompt that have them, from a step that ran or is in flight
    num_computed   tokens whose KV is written or being written by a step in flight
    in_flight      sampled tokens that the host does not know yet
    miscounted     penalties ask for its tokens, and its row does not count those that are computed
    preemptions    how often its pages were taken away
    decodes_until  while fewer tokens are computed, each step feeds the one that the step before gave, and nothing has
                   to be looked at: pages and length allow it. 0 where somebody has to look
    looks_at       outputs with which a block is full or the sequence ends; set when it is added
    ends           the tokens that end it; set when it is added
    hashes         of its full blocks; None where it shares no pages
    num_kept       pages in front that others can find
    num_cached     tokens that it found in the prefix cache when it was first admitted; None before
    num_lost       tokens whose KV it had when it was last preempted
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()
    scores_prompt: bool = False
    cache_salt: bytes = b""
    priority: int = 0
    streamed: bool = True
    rank: tuple[int, int] = (0, 0)
    max_total: int = 0
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    num_scored: int = 0
    num_computed: int = 0
    in_flight: int = 0
    miscounted: bool = False
    preemptions: int = 0
    decodes_until: int = 0
    looks_at: int = 0
    ends: frozenset[int] = frozenset()
    hashes: BlockHashes | None = None
    num_kept: int = 0
    num_cached: int | None = None
    num_lost: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows: the prompt and the outputs so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """All tokens, those in flight included."""
        return self.num_known + self.in_flight

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start..stop-1, all of them known."""
        prompt_len = len(self.prompt_ids)
        if stop <= prompt_len:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:prompt_len] + self.output_ids[max(0, start - prompt_len) : stop - prompt_len]

    def scored_in(self, start: int, stop: int) -> range:
        """The positions in start..stop-1 whose logits rate the prompt's next token, and which no step has rated."""
        if not self.scores_prompt:
            return range(0)
        first = max(start, self.num_scored)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))

    def end_tokens(self) -> frozenset[int]:
        """The tokens that end the sequence: the model's own, unless they are ignored, and the request's."""
        own = frozenset() if self.params.ignore_eos else self.eos_ids
        return own | frozenset(self.params.stop_token_ids)

    def end_after(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether the sequence ends with `token`, its last output: (finish_reason, stop_reason), or None.

        Stop strings are looked for where there is text; here are the ends that token ids and lengths tell.
        """
        if token == INVALID_TOKEN:
            return "error", None
        if token in self.eos_ids and not self.params.ignore_eos:
            return "stop", None
        if token in self.params.stop_token_ids:
            return "stop", token
        if self.num_known >= self.max_total:
            return "length", None
        return None
