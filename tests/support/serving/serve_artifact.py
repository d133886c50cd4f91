"""An artifact served: teacher-forced logits and greedy tokens. Run as a script it does so in a process of its own.

    python serve_artifact.py JOBS.json RESULT.safetensors

writes the logits to RESULT and prints the rest as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, SamplingParams
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.parse import parse_type
from ingot.runtime.loading.loader import load_artifact

CHUNK = 7  # tokens of a sequence in a step of the harness: cuts pages and prompts at odd places
STEP_TOKENS = 24  # in a step of the engine, when chunked: less than most prompts


_PAGE_SIZE = 16  # what artifacts are compiled with where nothing is said


@dataclass(frozen=True)
class Job:
    """What to serve: `prompts` for `new_tokens` greedy tokens each, and the logits of whole `sequences`."""

    artifact: str
    prompts: list[list[int]]
    sequences: list[list[int]]
    new_tokens: int
    chunked: bool


@dataclass(frozen=True)
class Result:
    """`logits` per sequence, `tokens` per prompt. Of the engine's steps: the most tokens of one sequence in a step,
    and how often a sequence went on with more than one token (a later chunk of a prompt)."""

    logits: list[torch.Tensor]
    tokens: list[list[int]]
    longest_chunk: int
    later_chunks: int


def teacher_forced_artifact(artifact: str, sequences: Sequence[Sequence[int]], chunk: int | None) -> list[torch.Tensor]:
    """Logits of every position of each sequence, at most `chunk` tokens of it a step."""
    pages = sum(-(-len(sequence) // _PAGE_SIZE) for sequence in sequences)
    loaded = load_artifact(artifact, num_pages=pages + 9)  # a few that none uses; nothing is given back here
    return teacher_forced(
        {name: parse_type(text) for name, text in loaded.plan.inputs.items()},
        lambda inputs: {name: value.cpu() for name, value in loaded.executor.launch(inputs).outputs.items()},
        sequences,
        chunk=chunk,
        pages=loaded.num_pages,
        seed=1,
    )


def serve(job: Job) -> Result:
    logits = teacher_forced_artifact(job.artifact, job.sequences, CHUNK if job.chunked else None)
    llm = LLM(
        job.artifact,
        enable_chunked_prefill=job.chunked,
        max_num_batched_tokens=STEP_TOKENS if job.chunked else None,
    )
    steps: list[tuple[list[int], list[int]]] = []
    executor = llm._loaded.executor
    launch = executor.launch

    def watched(inputs: Mapping[str, torch.Tensor]) -> Any:
        steps.append((inputs["q_lens"].tolist(), inputs["starts"].tolist()))
        return launch(inputs)

    executor.launch = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job.prompts], params)
    chunks = [chunk for lengths, starts in steps for chunk in zip(lengths, starts, strict=True)]
    return Result(
        logits=logits,
        tokens=[output.outputs[0].token_ids for output in outputs],
        longest_chunk=max(length for length, _ in chunks),
        later_chunks=sum(length > 1 and start > 0 for length, start in chunks),
    )


def main(arguments: Sequence[str]) -> None:
    jobs_file, result_file = arguments
    results = [serve(Job(**job)) for job in json.loads(Path(jobs_file).read_text())]
    logits = {f"{job}.{index}": rows for job, result in enumerate(results) for index, rows in enumerate(result.logits)}
    save_file(logits, result_file)
    answers = [{**vars(result), "logits": None} for result in results]
    compilers = sorted({"torch._inductor", "torch._dynamo", "transformers"} & sys.modules.keys())
    print(json.dumps({"answers": answers, "compilers": compilers}))


def serve_in_new_process(jobs: Sequence[Job], folder: Path) -> list[Result]:
    """`serve` each job in one new process; `folder` is for its files."""
    jobs_file, result_file = folder / "jobs.json", folder / "result.safetensors"
    jobs_file.write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, __file__, str(jobs_file), str(result_file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert not said["compilers"], "serving loaded a compiler"
    logits = load_file(result_file)
    return [
        Result(**{**answer, "logits": [logits[f"{job}.{index}"] for index in range(len(jobs[job].sequences))]})
        for job, answer in enumerate(said["answers"])
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
