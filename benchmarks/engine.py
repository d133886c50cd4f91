"""Ingot as an engine that decode_method.py can measure."""

from collections.abc import Mapping
from pathlib import Path

from decode_method import Generate, Prompts

from ingot import LLM, SamplingParams, open_artifact


def limits_of(artifact: Path) -> Mapping[str, int]:
    """Return the limits that an artifact was compiled for by name, such as "max_batch". "vocab_size" is among them."""
    model = open_artifact(artifact, verify=False).manifest.model
    return {name: int(str(model[name])) for name in ("vocab_size", "max_batch", "max_seq_len", "max_tokens")}


def device_of(artifact: Path) -> str:
    """Return the device that an artifact was compiled for: "cpu" or "cuda"."""
    return str(open_artifact(artifact, verify=False).manifest.target["device"])


def generate_with(llm: LLM) -> Generate:
    """Return a function that generates with Ingot's `LLM`.

    It decodes greedily, ignores end tokens and does not detokenize.
    """

    def generate(prompts: Prompts, count: int) -> object:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return outputs

    return generate
