"""Ingot as what the methods of decode_method.py and serve_method.py measure."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from decode_method import Generate, Prompts

from ingot import LLM, SamplingParams, open_artifact
from ingot.bench.drive import drive
from ingot.bench.engine import BenchEngine
from ingot.bench.workload import BenchRequest


def limits_of(artifact: Path) -> Mapping[str, int]:
    """The sizes that an artifact was compiled for, and its vocabulary's."""
    model = open_artifact(artifact, verify=False).manifest.model
    return {name: int(str(model[name])) for name in ("vocab_size", "max_batch", "max_seq_len", "max_tokens")}


def device_of(artifact: Path) -> str:
    """ "cpu" or "cuda": what an artifact was compiled for."""
    return str(open_artifact(artifact, verify=False).manifest.target["device"])


def driven_generate(engine: BenchEngine) -> Generate:
    """An engine that is driven in other ways too; here it tells of a request when that has ended."""

    def generate(prompts: Prompts, count: int) -> object:
        run = drive(replace(engine, stream=False), [BenchRequest(tuple(prompt), count) for prompt in prompts])
        assert all(len(one.token_times) == count for one in run.completed) and len(run.completed) == len(prompts)
        return run

    return generate


def ingot_generate(artifact: Path) -> Generate:
    """The whole engine, scheduling and sampling included: greedy, past the end tokens, without making text."""
    llm = LLM(artifact)

    def generate(prompts: Prompts, count: int) -> object:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return outputs

    return generate
