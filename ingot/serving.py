"""What `LLM` imports when one is made, torch with it: an artifact's engine, and the prompts of a call as requests."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ingot.ir.errors import OptionError, RequestError
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.engine import Engine, EngineRequest
from ingot.runtime.loader import Loaded
from ingot.runtime.pages import PagePool
from ingot.runtime.prompt import Prompt, PromptLike
from ingot.runtime.sampling_params import SamplingParams
from ingot.runtime.scheduler import Scheduler, SchedulerConfig
from ingot.runtime.spare_time import nothing_to_do


def make_engine(
    loaded: Loaded,
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    chunked_prefill: bool,
    seed: int,
) -> Engine:
    """The engine of an artifact, within the limits that it was compiled for. Raises OptionError for larger ones."""
    limits = loaded.limits
    config = SchedulerConfig(
        max_batch=_within("max_num_seqs", max_num_seqs, limits.max_batch),
        max_tokens=_within("max_num_batched_tokens", max_num_batched_tokens, limits.max_tokens),
        max_seq_len=limits.max_seq_len,
        page_size=limits.page_size,
        chunked_prefill=chunked_prefill,
    )
    return Engine(
        loaded.executor,
        Scheduler(config, PagePool(loaded.num_pages, limits.page_size)),
        loaded.tokenizer,
        vocab_size=limits.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        seed=seed,
        work=executor.prepare if isinstance(executor := loaded.executor, CudaExecutor) else nothing_to_do,
    )


def make_requests(
    prompts: PromptLike | Sequence[PromptLike],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    ids: Iterator[int],
    default: Callable[[], SamplingParams],
    stream: bool,
) -> list[EngineRequest]:
    """A request for each prompt, numbered by `ids`; `default` gives what nobody asked for. Raises RequestError."""
    listed = [prompts] if isinstance(prompts, str | Mapping | Prompt) else _listed("prompts", prompts)
    if sampling_params is None:
        sampling_params = default()
    if isinstance(sampling_params, SamplingParams):
        params = [sampling_params] * len(listed)
    else:
        params = _listed("sampling params", sampling_params)
    if len(params) != len(listed):
        raise RequestError(f"{len(params)} sampling params for {len(listed)} prompts", expected="one, or one each")
    return [EngineRequest(str(next(ids)), prompt, one, stream) for prompt, one in zip(listed, params, strict=True)]


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} of type {type(values).__name__}", where="LLM.generate", expected="one, or a list")
    return list(values)


def _within(name: str, value: int | None, compiled: int) -> int:
    if value is None:
        return compiled
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= compiled:
        raise OptionError(f"{name} is {value!r:.80}", expected=f"1 to {compiled}, which the artifact was compiled for")
    return value
