"""vLLM on one checkpoint, in a process of its own that peer_vllm.py starts: clock and decode times, as JSON.

    PYTHONPATH=SITE python benchmarks/vllm_child.py CHECKPOINT [--load-format dummy] [--batch 1,32] --json FILE

It needs nothing but vLLM and plain Python: what lies beside this file, and what of ingot.bench is of that kind.
"""

import time

BEGUN = time.time()

import argparse  # noqa: E402  # the clock is read before anything is imported
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import asdict, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from ingot.bench.drive import Progress
    from ingot.bench.workload import BenchRequest

# It is not to ask for anything over the network, and FlashInfer's sampler would compile itself with nvcc first.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
MAX_MODEL_LEN = 4096  # tokens of a sequence, or more where they are asked for
# Of the GPU's memory, for weights and cache together: the rest is for what else runs there.
MEMORY_SHARE = 0.85


class VllmEngine:
    """vLLM as an engine that is driven: greedy, past the end tokens, without making text.

    It tells of a request with every token, or when it has ended, as vLLM's server and its `LLM.generate` ask for it.
    """

    def __init__(self, llm: Any, *, by_token: bool) -> None:
        self._engine = llm.llm_engine
        self._by_token = by_token
        self._made: dict[int, int] = {}

    def add(self, index: int, request: "BenchRequest") -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self._by_token else RequestOutputKind.FINAL_ONLY,
        )
        self._made[index] = 0  # tokens: an output has those alone that no earlier one had
        self._engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, params)

    def step(self) -> "Iterator[Progress]":
        from ingot.bench.drive import Progress

        for output in self._engine.step():
            index = int(output.request_id)
            self._made[index] += len(output.outputs[0].token_ids)
            yield Progress(index, self._made[index], output.finished)

    def has_unfinished(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


def main() -> None:
    # Imported here: vLLM's own processes import this file again, without these folders on their path.
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
    from decode_method import (
        PROMPT_TOKENS,
        Prompts,
        add_length_options,
        length_changes,
        lengths_of,
        measure_decode,
    )
    from serve_method import add_load_options, load_of, measure_serving

    import ingot.bench.drive  # noqa: F401  # now, while it is found

    del sys.path[:2]  # folders with names in them that could be those of what vLLM imports
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--batch", default="", help="sequences at once, separated by commas; none: only start")
    add_length_options(parser)
    parser.add_argument("--serve", action="store_true", help="measure serving by serve_method.py too")
    parser.add_argument("--prefix-caching", action="store_true", help="let vLLM keep what prompts have in common")
    add_load_options(parser)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ.update(SETTINGS)
    import vllm

    imported = time.time()
    load = load_of(options)
    llm = vllm.LLM(
        model=str(options.checkpoint),
        load_format=options.load_format,
        skip_tokenizer_init=True,
        max_model_len=max(MAX_MODEL_LEN, load.longest),
        gpu_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=options.prefix_caching,
    )
    loaded = time.time()

    def generate(prompts: Prompts, count: int) -> object:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return outputs

    generate([list(range(1, PROMPT_TOKENS + 1))], 1)
    clock = {"begun": BEGUN, "imported": imported, "loaded": loaded, "first": time.time()}
    changes = length_changes(options)
    vocab = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    decoded = {}
    for batch in map(int, filter(None, options.batch.split(","))):
        measured = measure_decode(generate, vocab, batch, replace(lengths_of(batch), **changes))
        decoded[batch] = asdict(measured)
    engines = (VllmEngine(llm, by_token=by_token) for by_token in (False, True))
    served = asdict(measure_serving(*engines, vocab, load)) if options.serve else None
    answer = {"clock": clock, "version": vllm.__version__, "decode": decoded, "served": served}
    options.json.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
