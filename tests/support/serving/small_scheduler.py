"""A scheduler with a small pool and requests for it, to schedule step by step without an engine."""

from ingot.runtime.pages.pool import PagePool
from ingot.runtime.pages.sequence_pages import one_pool
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import Given, Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig


def scheduler_of(num_pages=64, page_size=4, **config):
    config = {"max_batch": 4, "max_tokens": 16, "max_seq_len": 64, "prefix_caching": False, **config}
    return Scheduler(SchedulerConfig(page_size=page_size, **config), one_pool(PagePool(num_pages, page_size)))


def request_of(name, prompt_len, max_tokens=8, streamed=True, **params):
    prompt = list(range(1, prompt_len + 1))
    given = Given(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        streamed=streamed,
        scores_prompt="prompt_logprobs" in params,
    )
    return Request(given, seed=5)


def values(batch):
    """A step's inputs as lists."""
    return {name: view.tolist() for name, view in batch.inputs.items()}
