"""Compare two commits of Ingot on one machine, in turns: compile, start, decode, serving, and host time of a step.

    python benchmarks/compare_commits.py OLD NEW --out FILE.json (--shape 1b | --checkpoint FOLDER)
        [--only compile,start,decode,serve,host] [--rounds 5] [--seconds 560]

OLD and NEW are checkouts; `git archive COMMIT ingot ir passes frontend backends runtime models benchmarks` makes a
small one. Each compiles the same checkpoint into --work, with its own code and caches:
compile  `compile-model` with empty caches, then with the filled ones: compile_time.py of the checkout
start    from the start of a process to its first token after a prompt of 128: compare_child.py
decode   steps of some batches, in that process, as in decode.py: decode_method.py
serve    a long prompt, and many requests at once, in that process
host     host time of a step, which needs no GPU: engine_host.py of the checkout
A round measures both commits, each in a new process; the order alternates. The output has the medians of all samples
and their ratio. Most figures have a bar: the new commit must be no worse than a limit plus the spread of the samples
(compared.py). FILE is written after every sample. A later call with the same --work, sources and sizes adds to it. The
exit code is 1 if a bar is missed, or if a sample failed or had no time left.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from compared import SIDES, Comparison, read_comparison, table

HERE = Path(__file__).resolve().parent
PARTS = ("compile", "start", "decode", "serve", "host")
# Options of the measured processes, by part.
SIZES = {
    "decode": ("batch", "long", "short"),
    "serve": ("prompt", "requests", "input", "output"),
    "host": ("running", "cases"),
}
_SLACK = 1.2  # a sample may take this much longer than the longest of its kind so far
_ERROR = ("Error", "error:")
Figures = Mapping[str, float]
Sample = Callable[["Side", float], Figures]  # measures a commit within so many seconds


class SampleError(Exception):
    """A process that measures a commit failed or took too long. The message says why, in one line."""


@dataclass(frozen=True)
class Side:
    """One of the two compared commits.

    `name` is "old" or "new". `checkout` is the folder with its code. `work` is a folder for its artifact and caches.
    """

    name: str
    checkout: Path
    work: Path

    @property
    def artifact(self) -> Path:
        return self.work / "model.ingot"

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self.checkout), os.environ.get("PYTHONPATH")]))
        # A checkout's own scripts record its commit, and it may have no git. CUDA loads the code of all kernels
        # eagerly, as in ingot/bench/startup.py.
        return {"PYTHONPATH": path, "INGOT_REVISION": self.name, "CUDA_MODULE_LOADING": "EAGER"}


@dataclass(frozen=True)
class Turns:
    """Measures both commits in turns, until `deadline`, a value of time.monotonic().

    After each measurement, the comparison is written to `files`. `late` lists the measurements for which no time was
    left.
    """

    comparison: Comparison
    sides: Sequence[Side]
    deadline: float
    files: Sequence[Path]
    late: list[str] = field(default_factory=list)

    def take(self, kind: str, sample: Sample, times: int) -> None:
        longest = 0.0
        for number in range(times):
            for side in self.sides if number % 2 == 0 else self.sides[::-1]:
                begin = time.monotonic()
                if self.deadline - begin <= longest * _SLACK:
                    self.late.append(f"{kind}, sample {number + 1} of {times}, {side.name}: no time was left")
                    print(self.late[-1], flush=True)
                    return
                try:
                    found = sample(side, self.deadline - begin)
                except SampleError as error:
                    self.comparison.failed.append(f"{kind}, {side.name}: {error}")
                    found = {}
                self.comparison.add(side.name, found)
                for file in self.files:
                    self.comparison.write(file)
                took = time.monotonic() - begin
                longest = max(longest, took)
                figures = " ".join(f"{name}={value:.6g}" for name, value in found.items())
                print(f"{kind} {number + 1} {side.name}, {took:.1f} s: {figures}", flush=True)


def main() -> None:
    options = parse_options()
    deadline = time.monotonic() + options.seconds
    work = options.work / (options.shape or options.checkpoint.resolve().name)
    sides = [Side(name, getattr(options, name).resolve(), work / name) for name in SIDES]
    check_sides(sides, options.only)
    checkpoint = options.checkpoint or work / "checkpoint"
    if set(options.only) != {"host"} and not (checkpoint / "config.json").exists():
        process([HERE / "random_checkpoint.py", options.shape, checkpoint], {}, options.seconds, checkpoint.parent)
    sizes = [name for names in SIZES.values() for name in names]
    about = {
        "sources": {side.name: sources_digest(side.checkout) for side in sides},
        "machine": machine(),
        "settings": {name: getattr(options, name) for name in ("shape", "options", *sizes)},
    }
    comparison = read_comparison(work / "compared.json", about)
    turns = Turns(comparison, sides, deadline, (work / "compared.json", options.out))
    if "compile" in options.only:
        for name, way, times in (("compile", "full", options.first), ("compile_cached", "cached", options.second)):
            turns.take(name, partial(compile_sample, name, way, checkpoint, options.options), times)
    if {"start", "decode", "serve"} & set(options.only):
        vocab = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        turns.take("round", partial(round_sample, round_arguments(options, vocab)), options.rounds)
    if "host" in options.only:
        turns.take("host", partial(host_sample, options.running, options.cases), options.rounds)
    print(*table(comparison), sep="\n")
    if wrong := [*(f"missed: {name}" for name in comparison.missed()), *comparison.failed, *turns.late]:
        sys.exit("\n".join(wrong))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SIDES:
        parser.add_argument(name, type=Path, help=f"a checkout of the {name} commit")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", help="a shape of random_checkpoint.py, made unless --work has it")
    what.add_argument("--checkpoint", type=Path, help="a checkpoint instead of a shape")
    parser.add_argument("--out", type=Path, required=True, help="the file for samples and verdicts, FILE.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/ingot-compare"), help="folder of artifacts and caches")
    parser.add_argument("--only", type=part_names, default=PARTS, help="parts, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="compiles with empty caches, per side")
    parser.add_argument("--second", type=int, default=1, help="compiles with filled caches, per side")
    parser.add_argument("--seconds", type=float, default=560.0, help="seconds for all parts together")
    parser.add_argument("--options", default="--max-seq-len 4096", help="options of compile-model, as one string")
    parser.add_argument("--batch", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--long", type=int, help="see Lengths in decode_method.py")
    parser.add_argument("--short", type=int, help="see Lengths in decode_method.py")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--requests", type=int, default=512, help="requests submitted at once")
    parser.add_argument("--input", type=int, default=512, help="prompt tokens of each request")
    parser.add_argument("--output", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--running", type=int, default=256, help="sequences of a step whose host time is measured")
    parser.add_argument("--cases", default="alone,streamed,sampled", help="cases of engine_host.py")
    return parser.parse_args()


def part_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return names


def check_sides(sides: Sequence[Side], parts: Sequence[str]) -> None:
    """Exit if one of the two commits cannot be measured.

    This is so if its checkout has no Ingot, or if it has no compiled artifact. An artifact is not needed if the `parts`
    of the benchmark include "compile", which makes it, or are only "host".
    """
    for side in sides:
        if not (side.checkout / "ingot" / "__init__.py").is_file():
            sys.exit(f"{side.checkout} is not a checkout of Ingot: it has no ingot/__init__.py")
        if "compile" not in parts and set(parts) != {"host"} and not side.artifact.is_dir():
            sys.exit(f"{side.artifact} is missing: name `compile` in --only first")


def sources_digest(checkout: Path) -> str:
    """Return a digest of all Python files that `import ingot` can run in a checkout.

    Files in folders that ingot/ links to are included.
    """
    digest = hashlib.sha256()
    ingot = checkout / "ingot"
    folders = [path.resolve() for path in sorted(ingot.iterdir()) if path.is_dir()]
    files = {*ingot.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))}
    for file in sorted(files):
        digest.update(f"{file.relative_to(checkout.resolve())}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> str:
    """Return the name of the GPU and its driver. Without a GPU, return the processor's architecture and number of
    cores."""
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.returncode:
            return done.stdout.partition("\n")[0]
    return f"{platform.machine()}, {os.cpu_count()} cores"


def compile_sample(name: str, way: str, checkpoint: Path, options: str, side: Side, seconds: float) -> Figures:
    script = [side.checkout / "benchmarks" / "compile_time.py", checkpoint, "--work", side.work, "--measure", way]
    answer = measured(side, [*script, f"--options={options}"], seconds)
    return {name: answer["figures"][name]["value"]}


def round_arguments(options: argparse.Namespace, vocab: int) -> list[str | int]:
    parts = [part for part in ("decode", "serve") if part in options.only]
    given = {name: getattr(options, name) for part in parts for name in SIZES[part]}
    asked = [item for name, value in given.items() if value is not None for item in (f"--{name}", value)]
    return ["--vocab", vocab, *asked]


def round_sample(arguments: Sequence[str | int], side: Side, seconds: float) -> Figures:
    """Measure start, decode and serving of one commit once, in a new process. Return the measured numbers by name.

    `arguments` are further command line arguments of compare_child.py. `seconds` is the time limit.
    """
    started = time.time()
    script = [HERE / "compare_child.py", side.artifact, "--checkout", side.checkout, *arguments]
    answer = measured(side, script, seconds)
    clock = answer["clock"]
    found = {
        "first_token": clock["first"] - started,
        "import": clock["imported"] - clock["begun"],
        "load": clock["loaded"] - clock["imported"],
    }
    if (context := answer["timings"].get("context")) is not None:  # a CPU has none
        found |= {"context": context, "first_token_less_context": found["first_token"] - context}
    phases = {f"phase_{name}": seconds for name, seconds in answer["timings"].items()}
    return {**found, **phases, **answer["figures"]}


def host_sample(running: int, cases: str, side: Side, seconds: float) -> Figures:
    script = [side.checkout / "benchmarks" / "engine_host.py", "--running", running, "--only", cases]
    answer = measured(side, script, seconds)
    return {f"host_{case}": answer["figures"][f"step_{case}"]["value"] for case in cases.split(",")}


def measured(side: Side, script: Sequence[str | int | Path], seconds: float) -> Any:
    """Run a script with the code of one commit. Return the content of the JSON file that the script writes.

    The option `--json FILE` is added to `script`. Raises SampleError if the script fails or takes longer than
    `seconds`.
    """
    side.work.mkdir(parents=True, exist_ok=True)
    answer = side.work / "answer.json"
    answer.unlink(missing_ok=True)
    process([*script, "--json", answer], side.env, seconds, side.work)
    try:
        return json.loads(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SampleError(f"it succeeded but wrote no answer: {error}") from None


def process(script: Sequence[str | int | Path], env: Mapping[str, str], seconds: float, folder: Path) -> None:
    """Run a Python script in `folder` and wait for its end. `env` has environment variables to add.

    The folder must not be a checkout, because `python -m ingot` would import Ingot from there. Raises SampleError if
    the script fails or takes longer than `seconds`. Its child processes are ended too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running = subprocess.Popen(
        [sys.executable, *map(str, script)],
        env={**os.environ, **env},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise SampleError(f"{Path(str(script[0])).name} was stopped after {seconds:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    if running.returncode:
        lines = [line for line in printed.splitlines() if line.strip()]
        print(*lines[-20:], sep="\n", file=sys.stderr)
        errors = [line for line in lines if any(word in line for word in _ERROR)] or lines
        reason = errors[-1] if errors else "it printed nothing"
        raise SampleError(f"{Path(str(script[0])).name} ended with status {running.returncode}: {reason}")


if __name__ == "__main__":
    main()
