"""An artifact served where nothing can be built: no compiler can be imported, and no process started.

    python frozen_serve.py JOB.json

prints what came out as JSON. Run it with `frozen_environment`, which leaves no program to be found either.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# What compiles, and what would only be there on a machine that compiles.
COMPILERS = ("triton", "torch._inductor", "torch._dynamo", "ninja", "ingot.passes", "ingot.frontend", "ingot.models")
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn")


@dataclass(frozen=True)
class Job:
    """What to serve, greedily: each batch of prompts at once, for `new_tokens` tokens each."""

    artifact: str
    batches: list[list[list[int]]]
    new_tokens: int


@dataclass(frozen=True)
class Served:
    """`tokens` by batch and prompt; the bucket classes of all steps, in the order of their first; the rows of the CUDA
    graphs that were captured; and the compilers that somebody asked for in vain."""

    tokens: list[list[list[int]]]
    buckets: list[str]
    graphs: list[int]
    refused: list[str]


class _NoCompilers:
    """Finds compilers before anybody else does, and refuses them."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if f"{name}.".startswith(tuple(f"{root}." for root in COMPILERS)):
            self.refused.append(name)
            raise ModuleNotFoundError(f"{name} is a compiler's, and this process is frozen", name=name)
        return None


def freeze() -> list[str]:
    """From here on this process imports no compiler and starts no process. The compilers asked for come in the list."""
    # torch asks for Triton without need when it starts on a GPU: there it is not installed, as far as anybody can tell.
    sys.modules["triton"] = None  # type: ignore[assignment]  # what the import system takes for "not there"
    finder = _NoCompilers()
    sys.meta_path.insert(0, finder)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            raise PermissionError(f"{event}{arguments!r:.200} in a frozen process")

    sys.addaudithook(watch)
    return finder.refused


def serve(job: Job) -> Served:
    from ingot import LLM, SamplingParams

    llm = LLM(job.artifact, cuda_graphs="need")  # or steps of many sequences are launched one by one for a while
    executor = llm._loaded.executor
    launch = executor.launch
    buckets: dict[str, None] = {}

    def watched(inputs: Mapping[str, Any]) -> Any:
        handle = launch(inputs)
        buckets[handle.bucket] = None
        return handle

    executor.launch = watched  # type: ignore[method-assign, assignment]
    params = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True)
    tokens = [
        [out.outputs[0].token_ids for out in llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params)]
        for batch in job.batches
    ]
    return Served(tokens, list(buckets), sorted(executor.captured.decode), [])


def frozen_environment(environment: Mapping[str, str], empty: Path) -> dict[str, str]:
    """An environment in which no program is found in the folder `empty`, and no driver compiles PTX."""
    compilers = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "LD_PRELOAD")
    kept = {name: value for name, value in environment.items() if name not in compilers}
    return {**kept, "PATH": str(empty), "CUDA_DISABLE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"}


def serve_frozen(job: Job, environment: Mapping[str, str], folder: Path) -> Served:
    """`serve` in a new frozen process; `folder` is for its files."""
    empty = folder / "empty"
    empty.mkdir()
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(asdict(job)))
    done = subprocess.run(
        [sys.executable, __file__, str(job_file)],
        env=frozen_environment(environment, empty),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Served(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> None:
    import torch  # noqa: F401  # what torch itself does when it is imported is its own business

    refused = freeze()
    served = serve(Job(**json.loads(Path(arguments[0]).read_text())))
    print(json.dumps(asdict(replace(served, refused=refused))))


if __name__ == "__main__":
    main(sys.argv[1:])
