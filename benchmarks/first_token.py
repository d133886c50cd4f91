"""An artifact's first token, in a process of its own that cold_start.py starts: the clock at each phase's end, as JSON.

python benchmarks/first_token.py ARTIFACT --json FILE
"""

import time

BEGUN = time.time()

import json  # noqa: E402  # the clock is read before anything is imported
import sys  # noqa: E402

from decode_method import PROMPT_TOKENS  # noqa: E402

from ingot import LLM, SamplingParams  # noqa: E402

IMPORTED = time.time()


def main(artifact: str, option: str, file: str) -> None:
    assert option == "--json"
    llm = LLM(artifact)
    loaded = time.time()
    # Small ids, which every vocabulary has.
    prompt = {"prompt_token_ids": list(range(1, PROMPT_TOKENS + 1))}
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False))
    first = time.time()
    clock = {"begun": BEGUN, "imported": IMPORTED, "loaded": loaded, "first": first}
    # What loading is made of; "import" and "ready" are readings of a clock that starts with the process, as here.
    phases = {name: seconds for name, seconds in llm.timings.items() if name not in ("import", "ready")}
    with open(file, "w", encoding="utf-8") as out:
        json.dump({"clock": clock, "phases": phases}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
