"""Set up the engine of an artifact, and turn the prompts of a call of `LLM` into requests. Importing this imports
torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ingot.ir.artifact.plan import GPU_FEW_TOKENS, PLAN_FILE, Plan
from ingot.ir.errors import ArtifactError, OptionError, RequestError
from ingot.ir.features import POOL, feeds_whole, unserved_params
from ingot.ir.mesh import STAGES
from ingot.ir.parse import parse_ending, parse_type
from ingot.runtime.adapters.host_adapter import read_places
from ingot.runtime.adapters.manager import DEFAULT_HOST_ADAPTERS, AdapterManager
from ingot.runtime.engines.engine import Engine, EngineRequest
from ingot.runtime.engines.pooling_engine import PoolingEngine, PoolingRequest
from ingot.runtime.loading.loader import Loaded
from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.sequence_pages import pools_of
from ingot.runtime.pages.shared_prefixes import least_saved
from ingot.runtime.params.given_numbers import as_integer
from ingot.runtime.params.pooling_params import PoolingParams
from ingot.runtime.params.prompt import Prompt, PromptLike
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.blocks import blocks_of, max_drafts
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import DEFAULT_MIXED_TOKENS, Policy, SchedulerConfig
from ingot.runtime.steps.step import layout_of
from ingot.runtime.steps.step_outputs import VECTORS


def make_engine(
    loaded: Loaded,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_num_mixed_tokens: int | None,
    chunked_prefill: bool,
    prefix_caching: bool | None,
    cascade: bool,
    policy: Policy,
    seed: int,
    enable_lora: bool | None = None,
    max_cpu_loras: int | None = None,
) -> Engine | PoolingEngine:
    """Return the engine for a loaded artifact: an Engine, or a PoolingEngine if the model ends in pooling.

    max_model_len            the most tokens of a sequence; None: the limit of the artifact
    max_num_seqs             the most sequences in a step; None: the limit of the artifact
    max_num_batched_tokens   the most tokens in a step; None: the limit of the artifact
    max_num_mixed_tokens     the most prompt tokens in a step that also decodes a streamed request; None:
                             DEFAULT_MIXED_TOKENS, or the artifact's limit of tokens if that is lower
    chunked_prefill          whether a prompt may be split over several steps
    prefix_caching           whether prompts with a common prefix share its pages; None: yes if the model has a paged KV
                             cache
    cascade                  whether attention may read a shared prefix once for all its sequences
    policy                   which request is served first: "fcfs" or "priority"
    seed                     seeds the requests that have no seed
    enable_lora              whether requests may use LoRA adapters; None: if the artifact was compiled for them
    max_cpu_loras            the most adapters that the host keeps; None: DEFAULT_HOST_ADAPTERS

    Raises OptionError for a limit above the artifact's, and for `prefix_caching` True without a paged KV cache.
    """
    limits, plans = loaded.limits, loaded.served
    plan = plans.plans["main"]
    ending = parse_ending(plan.ending)
    pools, whole = ending.name == POOL.name, feeds_whole(ending)
    config = SchedulerConfig(
        max_batch=_within("max_num_seqs", max_num_seqs, limits.max_batch),
        max_tokens=_within("max_num_batched_tokens", max_num_batched_tokens, limits.max_tokens),
        max_mixed_tokens=_within("max_num_mixed_tokens", max_num_mixed_tokens, limits.max_tokens, DEFAULT_MIXED_TOKENS),
        max_seq_len=_within("max_model_len", max_model_len, limits.max_seq_len),
        page_size=limits.page_size,
        chunked_prefill=chunked_prefill and not whole,
        prefix_caching=_prefix_caching(prefix_caching, plan),
        policy=policy,
        whole=whole,
        max_drafts=max_drafts(plans),
        few_tokens=_few_tokens(plan),
        least_shared=_least_shared(loaded) if cascade else None,
        blocks=blocks_of(plans),
        unserved=() if pools else unserved_params(plan.inputs),
        stages=1 if loaded.leader is None else loaded.context.mesh.get(STAGES, 1),
    )
    layout = layout_of(plans.plans[entry].inputs for entry in loaded.entries)
    steps = loaded.round
    slots = PagePool(loaded.slots) if loaded.slots else None
    check_slots(config, slots)
    scheduler = Scheduler(config, pools_of(loaded.pages, limits.page_size, loaded.scratch_pages), layout, slots)
    if pools:
        width = parse_type(plan.outputs[VECTORS]).shape[-1]
        assert isinstance(width, int)
        attributes = POOL.set_by(ending)
        return PoolingEngine(
            steps,
            scheduler,
            loaded.tokenizer,
            vocab_size=limits.vocab_size,
            width=width,
            unit=bool(attributes["unit"]),
            classes=bool(attributes["classes"]),
            work=steps.prepare,
        )
    return Engine(
        steps,
        scheduler,
        loaded.tokenizer,
        vocab_size=limits.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        seed=seed,
        work=steps.prepare,
        pin_memory=loaded.context.device.type == "cuda",
        adapters=_adapters(loaded, enable_lora=enable_lora, max_cpu_loras=max_cpu_loras),
    )


def _few_tokens(plan: Plan) -> int:
    """Return up to how many tokens a step runs the code of decode steps. This is the code of every bucket class (range
    of step sizes with one compiled plan) but the last. If there is only one class, the time grows with the tokens."""
    classes = [one.bucket.tokens[1] for one in plan.buckets if one.bucket.q_max is None]
    return classes[-2] if len(classes) > 1 else min(classes[-1], GPU_FEW_TOKENS)


def _adapters(loaded: Loaded, *, enable_lora: bool | None, max_cpu_loras: int | None) -> AdapterManager | None:
    """Return the manager of LoRA adapters; None if the artifact was compiled for none, or if they are turned off.

    Raises OptionError if adapters are asked for and the artifact was compiled for none.
    """
    if not (enable_lora is None or isinstance(enable_lora, bool)):
        raise OptionError(f"enable_lora is {enable_lora!r:.80}", expected="True, False or None")
    if not loaded.has_adapters or enable_lora is False:
        if enable_lora:
            raise OptionError(
                "enable_lora for an artifact that was compiled for no adapters",
                expected="an artifact of compile-model --max-loras N",
            )
        return None
    places = read_places(loaded.artifact, loaded.plans.states)
    most = DEFAULT_HOST_ADAPTERS if max_cpu_loras is None else max_cpu_loras
    if not isinstance(most, int) or isinstance(most, bool) or most < places.num_slots:
        raise OptionError(
            f"max_cpu_loras is {max_cpu_loras!r:.80}",
            expected=f"at least {places.num_slots}, the adapters on the device",
        )
    return AdapterManager(places, loaded.executor.states, loaded.context.stream, most)


def make_requests(
    prompts: PromptLike | Sequence[PromptLike],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    ids: Iterator[int],
    default: Callable[[], SamplingParams],
    priority: Sequence[int] | None,
    stream: bool,
    adapters: str | Sequence[str | None] | None = None,
) -> list[EngineRequest]:
    """Return one engine request for each prompt.

    sampling_params   one for all prompts or one for each; None: `default` makes one for all
    ids               yields numbers to identify the requests
    priority          one integer for each prompt; None: 0 for all
    stream            return an output after each new token; False: only at the end
    adapters          the name of a LoRA adapter for all prompts, or one name or None for each; None: none

    Raises RequestError for params or priorities that do not match the prompts.
    """
    params = default() if sampling_params is None else sampling_params
    paired = _paired(prompts, "sampling params", params, SamplingParams, priority)
    names = [adapters] * len(paired) if adapters is None or isinstance(adapters, str) else list(adapters)
    if len(names) != len(paired):
        raise RequestError(f"{len(names)} adapters for {len(paired)} prompts", expected="one, or one each")
    return [
        EngineRequest(str(next(ids)), prompt, chosen, stream, rank, adapter=name)
        for (prompt, chosen, rank), name in zip(paired, names, strict=True)
    ]


def make_pooling_requests(
    prompts: PromptLike | Sequence[PromptLike],
    pooling_params: PoolingParams | Sequence[PoolingParams] | None,
    *,
    ids: Iterator[int],
    priority: Sequence[int] | None,
) -> list[PoolingRequest]:
    """Return one pooling request for each prompt.

    pooling_params   one for all prompts or one for each; None: the default for all
    ids              yields numbers to identify the requests
    priority         one integer for each prompt; None: 0 for all

    Raises RequestError for params or priorities that do not match the prompts.
    """
    params = PoolingParams() if pooling_params is None else pooling_params
    return [
        PoolingRequest(str(next(ids)), prompt, chosen, rank)
        for prompt, chosen, rank in _paired(prompts, "pooling params", params, PoolingParams, priority)
    ]


def _paired(
    prompts: PromptLike | Sequence[PromptLike],
    name: str,
    given: Any,
    kind: type[SamplingParams] | type[PoolingParams],
    priority: Sequence[int] | None,
) -> list[tuple[Any, Any, int]]:
    """Return (prompt, params, priority) for each prompt.

    name       the name of the params in errors, such as "sampling params"
    given      one params object for all prompts, or a list with one for each
    kind       the class of a params object
    priority   one integer for each prompt; None: 0 for all
    """
    listed = [prompts] if isinstance(prompts, str | Mapping | Prompt) else _listed("prompts", prompts)
    params = [given] * len(listed) if isinstance(given, kind) else _listed(name, given)
    if len(params) != len(listed):
        raise RequestError(f"{len(params)} {name} for {len(listed)} prompts", expected="one, or one each")
    priorities = [0] * len(listed) if priority is None else _listed("priorities", priority)
    if len(priorities) != len(listed):
        raise RequestError(f"{len(priorities)} priorities for {len(listed)} prompts", expected="one each")
    for one in priorities:
        if as_integer(one) is None:
            raise RequestError(f"priority is {one!r:.80}", where="priority", expected="an integer")
    return list(zip(listed, params, map(int, priorities), strict=True))


def _least_shared(loaded: Loaded) -> int | None:
    """Return how many reads of cached positions cascade attention must save in a step to be faster.

    Cascade attention reads a prefix shared by several sequences once. Return None if the model's attention does not
    support it.
    """
    if "sharing" not in loaded.plan.inputs:
        return None
    from ingot.ir.machine.find_gpu import find_gpu

    return least_saved(loaded.plan, find_gpu(), loaded.limits.page_size)


def _prefix_caching(chosen: bool | None, plan: Plan) -> bool:
    """Return whether sequences with a common prefix share its cached pages.

    `chosen` is the user's choice; None means yes if the model has a paged KV cache. Raises OptionError if `chosen` is
    no bool, or if it is True and the model has no paged KV cache.
    """
    if not (chosen is None or isinstance(chosen, bool)):
        raise OptionError(f"enable_prefix_caching is {chosen!r:.80}", expected="True, False or None")
    if chosen and not plan.memory.groups:
        raise OptionError(
            "prefix caching for a model without a paged KV cache", hint="leave enable_prefix_caching out, or pass False"
        )
    return bool(plan.memory.groups) if chosen is None else chosen


def check_slots(config: SchedulerConfig, slots: PagePool | None) -> None:
    """Raise ArtifactError if the model keeps a state per sequence and its steps can reject tokens.

    An example is a model with convolution states and draft tokens. A rejected token has already changed the state, and
    that cannot be undone. `slots` is the pool of such states; None if the model has none.
    """
    if slots is not None and (config.max_drafts or config.blocks.denoised):
        what = "feeds drafts" if config.max_drafts else "denoises blocks"
        raise ArtifactError(
            f"the entry 'main' {what}, and has a state that is kept once per sequence",
            where=PLAN_FILE,
            expected="states in pages alone, which rejected tokens do not change",
            hint="compile a definition with another ending",
        )


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} of type {type(values).__name__}", where=name, expected="one, or a list")
    return list(values)


def _within(name: str, value: int | None, compiled: int, usual: int | None = None) -> int:
    if value is None:
        return compiled if usual is None else min(usual, compiled)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= compiled:
        raise OptionError(f"{name} is {value!r:.80}", expected=f"1 to {compiled}, which the artifact was compiled for")
    return value
