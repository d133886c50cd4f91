"""Measure the cache memory that sequences take, compared with caches that keep every token.

    python benchmarks/cache_groups.py ARTIFACT [--long 32768] [--short 8192] [--output 64] [--folder FOLDER]

A prompt of --long tokens is served alone, and the memory of its sequence is read before every step. In groups with a
window the sequence gets only the pages that one step with the maximum of tokens needs. With more free pages, a prefill
chunk would take more, so that the prefix cache has more positions to resume from. Then a second request has the prompt,
its answer and some more tokens, as the next turn of a chat. The number of sequences of --short tokens that fit is
computed from the page pools. For a model that keeps every token in all caches, each ratio is 1.
    peak      maximum cache bytes of the long sequence in prefill, with scratch pages, relative to keeping all tokens
    between   the same in decode
    found     tokens of the second request that the prefix cache finds, relative to those in whole pages
    fitting   sequences of --short tokens that fit at a time, relative to keeping all tokens
"""

import argparse
import random
from pathlib import Path

from results import Figure, print_figures, write_result

from ingot import LLM, SamplingParams
from ingot.ir.cache.memory import MemoryNeed
from ingot.runtime.engines.engine import EngineRequest

_NEW = 17  # tokens of a second turn: no whole number of pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--long", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--short", type=int, default=8192, help="tokens of the counted sequences")
    parser.add_argument("--output", type=int, default=64, help="output tokens after the prompt")
    parser.add_argument("--folder", type=Path, help="folder for the result, instead of benchmarks/results")
    options = parser.parse_args()
    figures = measure(LLM(options.artifact), options.long, options.short, options.output)
    print_figures(figures)
    settings = {"artifact": options.artifact.name, "long": options.long, "short": options.short}
    print(
        write_result(
            __file__, "cache_groups", settings, figures, **({"folder": options.folder} if options.folder else {})
        )
    )


def measure(llm: LLM, long: int, short: int, output: int) -> dict[str, Figure]:
    engine, pages = llm._engine, llm._engine._scheduler.pages
    limits, need = llm.loaded.limits, MemoryNeed.of(llm.loaded.plans, llm.loaded.context.allocator.granularity)
    sizes = [need.groups[group.name].page for group in pages.groups]
    draw = random.Random(0)
    withheld = {
        pool: pool.allocate(max(0, pool.num_free - in_step))
        for _, group, pool in pages.windows
        for in_step in [need.groups[group.name].pages_per_sequence + need.extra_in_step(group.name)]
    }

    def drawn(count: int) -> list[int]:
        return [draw.randrange(limits.vocab_size) for _ in range(count)]

    def held() -> int:
        return need.scratch_bytes + sum(
            (pool.num_held - len(withheld.get(pool, ())) + pool.num_releasing) * size
            for pool, size in zip(pages.pools, sizes, strict=True)
        )

    def whole(tokens: int) -> int:
        return -(-tokens // limits.page_size) * sum(sizes)

    prompt = drawn(long)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    engine.add_requests([EngineRequest("long", prompt, params)])
    (request,) = engine._scheduler.requests.values()
    seen: dict[bool, int] = {True: 0, False: 0}
    answer: list[int] = []
    while engine.has_unfinished():
        for result in engine.step():
            answer = list(result.outputs[0].token_ids)
        feeding = request.num_computed <= long
        seen[feeding] = max(seen[feeding], held())
    second = [*prompt, *answer, *drawn(_NEW)]
    (result,) = llm.generate([{"prompt_token_ids": second}], SamplingParams(temperature=0.0, max_tokens=1))
    for pool, kept in withheld.items():
        pool.free(kept)
    full = (long + output - 1) // limits.page_size * limits.page_size
    capacities = [
        pool.capacity // group.pages_between_steps(short, limits.page_size)
        for group, pool in zip(pages.groups, pages.pools, strict=True)
    ]
    memory = need.scratch_bytes + sum(pool.num_pages * size for pool, size in zip(pages.pools, sizes, strict=True))
    alone = memory // whole(short)
    return {
        "whole": Figure(value=whole(long), unit="B", what=f"a sequence of {long} tokens, every token kept"),
        "peak": Figure(value=seen[True] / whole(long), unit="", what="held at most while its prompt is fed, of that"),
        "between": Figure(value=seen[False] / whole(long + output), unit="", what="held while it decodes, of that"),
        "found": Figure(value=result.num_cached_tokens / full, unit="", what="tokens that a second turn finds, of all"),
        "sequences": Figure(value=min(capacities), unit="", what=f"sequences of {short} tokens that fit"),
        "fitting": Figure(value=min(capacities) / max(1, alone), unit="", what="over those of caches that keep all"),
    }


if __name__ == "__main__":
    main()
