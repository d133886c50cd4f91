"""Generate with an exported model by plain ONNX Runtime: python run_onnx.py FOLDER "a prompt" [TOKENS]."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def decode(folder: Path, prompt: Sequence[int], count: int) -> Iterator[np.ndarray]:
    """Yield the logits f32[vocab] of each of `count` steps. Each step takes the most likely token of the one before."""
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    config = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    # A layer with a window has a cache of a fixed size: the model drops old tokens. Other caches grow.
    windows = config.get("sliding_window", {"window_size": 0, "layers": []})
    caches = {}
    for one in session.get_inputs():
        if one.name.startswith("past_key_values."):
            length = windows["window_size"] if int(one.name.split(".")[1]) in windows["layers"] else 0
            caches[one.name] = np.zeros((1, one.shape[1], length, one.shape[3]), DTYPES[one.type])
    names = [one.name for one in session.get_outputs()]
    step, total = list(prompt), 0
    for _ in range(count):
        total += len(step)
        mask = np.ones((1, total), np.int64)
        given = {"input_ids": np.array([step], np.int64), "attention_mask": mask, **caches}
        results = dict(zip(names, session.run(names, given), strict=True))
        logits = results.pop("logits")[0, -1]
        caches = {name.replace("present", "past_key_values"): value for name, value in results.items()}
        yield logits
        step = [int(logits.argmax())]


def main() -> None:
    from tokenizers import Tokenizer

    folder, prompt = Path(sys.argv[1]), sys.argv[2]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = json.loads((folder / "genai_config.json").read_text())["model"]["eos_token_id"]
    tokens: list[int] = []
    for logits in decode(folder, tokenizer.encode(prompt).ids, count):
        tokens.append(int(logits.argmax()))
        if tokens[-1] in ends:
            break
    print(prompt + tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
