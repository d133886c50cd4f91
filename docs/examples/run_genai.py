"""Generate with an exported model by onnxruntime-genai: python run_genai.py FOLDER "a prompt" [TOKENS]."""

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import onnxruntime_genai as genai


def generate(model: genai.Model, prompt: Sequence[int], count: int) -> Iterator[int]:
    """Yield up to `count` tokens, each the most likely one."""
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + count, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
        yield int(generator.get_next_tokens()[0])


def main() -> None:
    model = genai.Model(sys.argv[1])
    tokenizer = genai.Tokenizer(model)
    prompt, count = sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 64
    print(prompt + tokenizer.decode(np.array(list(generate(model, tokenizer.encode(prompt), count)), np.int32)))


if __name__ == "__main__":
    main()
