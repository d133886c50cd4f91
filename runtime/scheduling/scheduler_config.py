"""The scheduler's configuration, and the check that a scheduler of that configuration can serve a request."""

from dataclasses import dataclass
from typing import Literal

from ingot.ir.artifact.plan import FEW_TOKENS
from ingot.ir.errors import OptionError, RequestError
from ingot.ir.features import ServedParam
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.runtime.pages.sequence_pages import SequencePages
from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.scheduling.blocks import ONE_BY_ONE, Blocks
from ingot.runtime.scheduling.request import Request

Policy = Literal["fcfs", "priority"]
# A matmul of this many rows nears the peak rate of an H200. There, such a step of an 8B model takes little longer than
# the 40 ms per token that MLPerf Inference v5.0 (Llama-2-70B, interactive) allows.
DEFAULT_MIXED_TOKENS = 2048
POLICIES: tuple[Policy, ...] = ("fcfs", "priority")
# Names of JSON properties and the text between two values have fewer tokens. Longer runs continue in the next step.
DEFAULT_FORCED = 32


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits and options of a scheduler.

    max_batch          the most sequences in a step, and so the most running sequences
    max_tokens         the most tokens in a step; at least max_batch, so that every running sequence can decode
    max_seq_len        the most tokens of a sequence, prompt and output together
    page_size          tokens in a page
    chunked_prefill    a prompt may be split over several steps. False: a prompt longer than max_tokens is refused; only
                       a preempted sequence that has become longer is split
    pin_memory         keep step inputs in page-locked memory, for non-blocking copies to a GPU
    prefix_caching     sequences with equal prefixes share pages, and kept states in models such as Mamba
    policy             which request is served first: "fcfs": the earliest; "priority": the one with the lowest priority
                       number, then the earliest
    max_mixed_tokens   the most prompt tokens in a step that also decodes a request with streamed output
    whole              the model needs every token of a sequence in one step: prompts are never split
    max_drafts         speculative decoding: the most draft tokens of a sequence to verify in one step
    few_tokens         steps of up to this many tokens run the code of decode steps
    max_forced         the most tokens of a sequence that its grammar forces and that one step feeds; 1: a step feeds
                       each token by itself
    least_shared       use cascade attention if it saves reading at least this many cached positions; None: never.
                       Cascade attention reads a shared prefix once for all its sequences
    blocks             the block sizes that attention masks or block diffusion require
    unserved           sampling parameters that have no effect with this model; a request that sets one is refused
    stages             the pipeline stages that compute a step; with several, each has a step of other sequences
    """

    max_batch: int
    max_tokens: int
    max_seq_len: int
    page_size: int = 16
    chunked_prefill: bool = True
    pin_memory: bool = False
    prefix_caching: bool = True
    policy: Policy = "fcfs"
    max_mixed_tokens: int = DEFAULT_MIXED_TOKENS
    whole: bool = False
    max_drafts: int = 0
    few_tokens: int = FEW_TOKENS
    max_forced: int = DEFAULT_FORCED
    least_shared: int | None = None
    blocks: Blocks = ONE_BY_ONE
    unserved: tuple[ServedParam, ...] = ()
    stages: int = 1

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_tokens", "max_mixed_tokens", "max_seq_len", "page_size", "max_forced", "stages"):
            if getattr(self, name) < 1:
                raise OptionError(
                    f"{name} = {getattr(self, name)}", where="SchedulerConfig", expected="an integer >= 1"
                )
        fed = max(1, self.blocks.denoised)
        if self.max_tokens < self.max_batch * fed:
            each, what = ("", "one token") if fed == 1 else (f" * {fed}", f"{fed} tokens")
            raise OptionError(
                f"max_tokens = {self.max_tokens} is less than max_batch{each} = {self.max_batch * fed}",
                where="SchedulerConfig",
                expected=f"max_tokens >= max_batch{each}: a step feeds at least {what} to every running sequence",
                hint="" if fed == 1 else f"LLM(max_num_seqs={max(1, self.max_tokens // fed)}), or a larger max_tokens",
            )
        if self.policy not in POLICIES:
            raise OptionError(f"policy is {self.policy!r:.80}", where="SchedulerConfig", expected=" or ".join(POLICIES))

    @property
    def feeds_forced(self) -> bool:
        """Whether a step may feed several tokens that a grammar forces. Not if positions see each other in blocks: a
        step must then hold whole blocks."""
        return self.max_forced > 1 and self.blocks.granule == 1 and not self.blocks.denoised

    @property
    def most_in_flight(self) -> int:
        """The most steps in flight: each pipeline stage runs a step of its own while the host builds the next one."""
        return self.stages + 1

    @property
    def rows(self) -> int:
        """The most rows of logits of one sequence in a step. This is 1, or more with drafts or block diffusion."""
        return max(1 + self.max_drafts, self.blocks.denoised)


def _least_outputs(request: Request) -> int:
    """Return the fewest tokens that a request generates: 0 for a pooling request, else 1."""
    return 0 if isinstance(request.params, PoolingParams) else 1


def max_total(request: Request, config: SchedulerConfig) -> int:
    """Return the most tokens of a request, prompt and output together. The vector of a pooling request counts as one
    output token."""
    if isinstance(request.params, PoolingParams):
        return len(request.prompt_ids) + 1
    limit, max_tokens = config.max_seq_len, request.params.max_tokens
    return limit if max_tokens is None else min(limit, len(request.prompt_ids) + max_tokens)


def check_servable(request: Request, config: SchedulerConfig, pages: SequencePages) -> None:
    """Raise RequestError if a scheduler with these limits can never serve the request, for example because it is longer
    than max_seq_len. `pages` has the page pools."""
    prompt_len, where = len(request.prompt_ids), f"request {request.request_id}"
    if prompt_len == 0:
        raise RequestError("the prompt is empty", where=where, expected="at least one token")
    least = _least_outputs(request)
    if prompt_len + least > config.max_seq_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens",
            where=where,
            expected=f"at most {config.max_seq_len - least}: max_seq_len{', less one token to generate' * least}",
            hint="shorten the prompt, or compile with a larger max_seq_len",
        )
    if config.whole and prompt_len > config.max_tokens:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, and the model sees all of them in one step",
            where=where,
            expected=f"at most {config.max_tokens}, the tokens of a step (max_num_batched_tokens)",
            hint="shorten the prompt, allow more tokens a step, or compile with larger max_tokens",
        )
    if not config.chunked_prefill and config.blocks.fed(prompt_len) > config.max_tokens:
        raise RequestError(
            f"the prompt has {prompt_len} tokens",
            where=where,
            expected=f"at most max_tokens = {config.max_tokens}, because chunked prefill is off",
            hint="turn chunked prefill on, or compile with larger max_tokens",
        )
    together = min(config.blocks.granule, prompt_len)
    if together > config.max_tokens:
        raise RequestError(
            f"{together} tokens of the prompt see each other, and must be fed in one step",
            where=where,
            expected=f"at most max_tokens = {config.max_tokens}",
            hint="compile with larger max_tokens",
        )
    if request.given.scores_prompt and not config.chunked_prefill:
        together = prompt_len
    if request.given.scores_prompt and min(together, prompt_len - 1) > MAX_SCORED:
        raise RequestError(
            f"{together} tokens of the prompt are fed in one step, with prompt_logprobs",
            where=where,
            expected=f"at most {MAX_SCORED + 1}",
            hint="" if config.chunked_prefill else "turn chunked prefill on",
        )
    # The last token is never fed, so it needs no place in the cache. A preempted sequence recomputes more tokens than
    # its prompt; without chunked prefill it feeds up to max_tokens of them in one step.
    most = config.blocks.most_fed(max_total(request, config))
    at_once = config.blocks.least(0, most) if config.chunked_prefill else min(most, config.max_tokens)
    for group, pool in zip(pages.groups, pages.pools, strict=True):
        if (need := pages.least(group, most, at_once)) > pool.capacity:
            named = "" if len(pages.groups) == 1 else f" of the group {group.name}"
            raise RequestError(
                f"prompt and output need {need} KV pages{named}",
                where=where,
                expected=f"at most {pool.capacity} pages of {pool.page_size} tokens, which is the whole cache{named}",
                hint=f"request fewer max_tokens, or serve with num_kv_pages of at least {need}, or more memory",
            )
    if request.given.priority and config.policy != "priority":
        raise RequestError(
            f'priority {request.given.priority} with the scheduling policy "fcfs"',
            where=where,
            expected="priority 0",
            hint='choose the scheduling policy "priority"',
        )
    for param in config.unserved:
        if param.used_by(request.params):
            raise RequestError(
                f"{param.name} = {getattr(request.params, param.name)!r}, which the model's ending does not serve",
                where=f"{where}, SamplingParams.{param.name}",
                expected=f"{param.name} = {param.nothing!r}",
                hint="use that, or compile a definition whose entry 'main' has an ending that serves it",
            )
