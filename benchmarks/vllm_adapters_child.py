"""Measure vLLM's decode steps with LoRA adapters, in a child process that adapters.py starts. Write JSON.

    PYTHONPATH=SITE python benchmarks/vllm_adapters_child.py CHECKPOINT --adapters FOLDER,FOLDER --json FILE

It needs only vLLM and plain Python. The steps are those of adapters.py: equal prompts, and the time between two steps
in which all sequences decode.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from step_gaps import step_gaps
from vllm_child import SETTINGS

_PROMPT = 128  # tokens, as in adapters.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--adapters", required=True, help="PEFT folders, separated by commas")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--memory-share", type=float, default=0.6, help="share of the GPU's memory that vLLM may use")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ.update(SETTINGS)
    del sys.path[0]  # module names of this folder could shadow vLLM's imports
    import vllm
    from vllm.lora.request import LoRARequest

    folders = options.adapters.split(",")
    llm = vllm.LLM(
        model=str(options.checkpoint),
        load_format=options.load_format,
        skip_tokenizer_init=True,
        max_model_len=4096,
        gpu_memory_utilization=options.memory_share,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=len(folders),
        max_lora_rank=options.rank,
    )
    vocab = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    adapters = [LoRARequest(f"adapter-{place}", place + 1, folder) for place, folder in enumerate(folders)]
    kinds: dict[str, list[Any]] = {"none": [None], "adapted": adapters}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(options.rounds + 1):
        for kind, used in kinds.items():
            gaps = list(_gaps(llm.llm_engine, vocab, used, options, turn))
            if turn:  # the first round loads the adapters
                times[kind].append(statistics.median(gaps[len(gaps) // 3 :]))
    options.json.write_text(json.dumps({"version": vllm.__version__, "times": times}), encoding="utf-8")


def _gaps(engine: Any, vocab: int, used: list[Any], options: argparse.Namespace, turn: int) -> Iterator[float]:
    """Serve sequences that use adapters in turn, and return the seconds between decode steps."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    draw = random.Random(turn)
    count = options.steps + 8
    for place in range(options.sequences):
        params = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        prompt = {"prompt_token_ids": [draw.randrange(vocab) for _ in range(_PROMPT)]}
        adapter = used[place % len(used)]
        engine.add_request(f"{turn}-{place}-{time.monotonic_ns()}", prompt, params, lora_request=adapter)
    return step_gaps(engine.step, engine.has_unfinished_requests, options.sequences)


if __name__ == "__main__":
    main()
