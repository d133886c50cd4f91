"""`LLM.beam_search`: check its arguments, and run the beam searches of its prompts."""

from collections.abc import Mapping, Sequence

from ingot.ir.errors import RequestError
from ingot.runtime.engines.beams import BeamSearch, BeamSearchOutput, Run, beam_search, check_room
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.pooling_engine import PoolingEngine
from ingot.runtime.loading.loader import Loaded
from ingot.runtime.params.beam_search_params import BeamSearchParams
from ingot.runtime.params.param_checks import integer, optional
from ingot.runtime.params.prompt import Prompt, PromptLike, read_prompts
from ingot.serve.failures import failure, raise_if_all_failed
from ingot.serve.progress import UseTqdm, progress

_LIMIT = optional(integer(1, expected="None or an integer >= 1"))


def search_beams(
    loaded: Loaded,
    engine: Engine | PoolingEngine,
    run: Run,
    prompts: PromptLike | Sequence[PromptLike],
    params: BeamSearchParams,
    use_tqdm: UseTqdm,
    concurrency_limit: int | None,
) -> list[BeamSearchOutput]:
    """Return the results of `LLM.beam_search`, which describes the arguments after `run`. Raises RequestError for bad
    ones, and GenerationError if every search failed.

    `run` serves prompts with sampling parameters by `engine`, the engine of the model `loaded`.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"beam search parameters of type {type(params).__name__}", expected="BeamSearchParams")
    if not isinstance(engine, Engine):
        raise RequestError(
            "the model makes vectors and no tokens",
            where="LLM.beam_search",
            expected="an artifact whose entry 'main' has an ending that samples",
            hint="call embed for the vectors of prompts",
        )
    listed = [prompts] if isinstance(prompts, str | Mapping | Prompt) else prompts
    if not isinstance(listed, list | tuple):
        raise RequestError(f"prompts of type {type(prompts).__name__}", where="prompts", expected="one, or a list")
    read = read_prompts(listed, loaded.tokenizer, loaded.limits.vocab_size)
    for index, prompt in enumerate(read):
        check_room(prompt, engine.max_seq_len, f"prompts[{index}]")
    together = _LIMIT("LLM.beam_search.concurrency_limit", concurrency_limit) or max(1, len(read))
    searches = [BeamSearch(prompt, params, engine.eos_token_ids, engine.max_seq_len) for prompt in read]

    bar = progress(use_tqdm, len(read), "Beam search")
    try:
        for first in range(0, len(searches), together):
            part = searches[first : first + together]
            beam_search(part, params, run)
            bar.update(len(part))
    finally:
        bar.close()
    results = [search.result(loaded.tokenizer) for search in searches]
    raise_if_all_failed([failure(result.sequences) for result in results])
    return results
