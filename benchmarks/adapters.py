"""Measure decode steps with LoRA adapters, and how long others wait while an adapter is loaded.

    compile-model CHECKPOINT -o ARTIFACT --max-loras 8 --max-lora-rank 16
    python benchmarks/adapters.py ARTIFACT [--plain ARTIFACT] [--sequences 32] [--adapters 8] [--rank 16]
                                  [--steps 96] [--rounds 5] [--vllm FOLDER --checkpoint CHECKPOINT] [--json FILE]

One engine decodes the same sequences in each round: with adapters, which the sequences use in turn, and without.
Another engine decodes them from --plain, an artifact of the same checkpoint that was compiled for no adapters. A step's
time is the median between the steps of a round, without the first third. A figure is the median of rounds, which
alternate.

Then the sequences decode without adapters while new adapters are loaded one after the other, each for one request. The
longest step of the others is compared with the median. The factors of all adapters are random.

`--vllm` names the folder to import vLLM from. It decodes the same sequences with the same adapters, in a process of its
own that ends before the engines above start.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peer import environment
from peers import PEERS
from random_adapter import write_random_adapter
from results import Figure, add_json_option, report
from step_gaps import step_gaps

from ingot import LLM, SamplingParams
from ingot.bench.children import run_child
from ingot.runtime.engines.engine import EngineRequest

_PROMPT = 128  # tokens
_LOADED = 6  # adapters that are loaded under traffic
_APART = 12  # steps between two of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--plain", type=Path, help="an artifact of the same checkpoint, compiled for no adapters")
    parser.add_argument("--sequences", type=int, default=32, help="decoding sequences")
    parser.add_argument("--adapters", type=int, default=8, help="adapters that the sequences use")
    parser.add_argument("--rank", type=int, default=16, help="their rank")
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind")
    parser.add_argument("--memory", type=int, help="bytes for each engine")
    parser.add_argument("--vllm", type=Path, help="folder to import vLLM from")
    parser.add_argument("--checkpoint", type=Path, help="what vLLM serves")
    add_json_option(parser)
    options = parser.parse_args()
    if options.vllm is not None and options.checkpoint is None:
        parser.error("--vllm needs --checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        folders = [
            write_random_adapter(options.artifact, Path(folder) / f"{seed}", options.rank, seed)
            for seed in range(options.adapters + _LOADED)
        ]
        used, later = folders[: options.adapters], folders[options.adapters :]
        figures = {} if options.vllm is None else _vllm_steps(used, Path(folder), options)
        llm = LLM(options.artifact, memory=options.memory)
        if options.sequences >= (most := llm.loaded.limits.max_batch):  # one more request needs a place in the step
            raise SystemExit(f"{options.sequences} sequences of {most} that a step can hold leave no place for another")
        plain = None if options.plain is None else LLM(options.plain, memory=options.memory)
        figures |= _steps(llm, plain, used, options) | _loading(llm, later, options)
    settings = {"artifact": options.artifact.name, "sequences": options.sequences, "adapters": options.adapters}
    settings |= {"rank": options.rank, "steps": options.steps}
    report(__file__, options.json, settings, figures)


def _vllm_steps(folders: list[Path], caches: Path, options: argparse.Namespace) -> dict[str, Figure]:
    """Return the times of vLLM's decode steps with adapters and without."""
    peer = PEERS["vllm"]
    command: list[str | Path] = [Path(__file__).with_name("vllm_adapters_child.py"), options.checkpoint]
    command += ["--adapters", ",".join(map(str, folders)), "--rank", str(options.rank)]
    command += ["--sequences", str(options.sequences), "--steps", str(options.steps), "--rounds", str(options.rounds)]
    found = run_child(command, env=environment(peer, options.vllm, caches / "caches")).value
    what = {"none": "none used", "adapted": f"with {len(folders)} adapters of rank {options.rank}"}
    step = f"a decode step of {options.sequences} sequences"
    return {
        peer.figure(found["version"], kind): Figure(
            value=statistics.median(times), unit="s", what=f"{peer.title} {found['version']}: {step}, {what[kind]}"
        )
        for kind, times in found["times"].items()
    }


def _steps(llm: LLM, plain: LLM | None, folders: list[Path], options: argparse.Namespace) -> dict[str, Figure]:
    """Return the times of decode steps with adapters and without, and their ratios."""
    manager = _manager(llm)
    for folder in folders:
        manager.add(folder.name, folder)
    kinds: dict[str, tuple[LLM, list[str | None]]] = {
        "none": (llm, [None]),
        "adapted": (llm, [folder.name for folder in folders]),
    }
    if plain is not None:
        kinds["plain"] = (plain, [None])
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(options.rounds + 1):
        for kind, (engine, names) in kinds.items():
            gaps = list(_gaps(engine, names, options, turn))
            if turn:  # the first round captures graphs and copies the adapters
                times[kind].append(statistics.median(gaps[len(gaps) // 3 :]))
    for folder in folders:
        manager.remove(folder.name)
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    what = {
        "none": "in an artifact for adapters, none used",
        "adapted": f"with {len(folders)} adapters of rank {options.rank}",
        "plain": "in an artifact for no adapters",
    }
    step = f"a decode step of {options.sequences} sequences"
    figures = {
        kind: Figure(value=medians[kind], unit="s", what=f"{step}, {what[kind]}", values=tuple(found))
        for kind, found in times.items()
    }
    figures["adapted_over_none"] = Figure(value=medians["adapted"] / medians["none"], unit="", what="ratio of steps")
    if plain is not None:
        figures["none_over_plain"] = Figure(value=medians["none"] / medians["plain"], unit="", what="ratio of steps")
    return figures


def _loading(llm: LLM, folders: list[Path], options: argparse.Namespace) -> dict[str, Figure]:
    """Return the longest step of other sequences while adapters are loaded, and the seconds until one can be used."""
    engine: Any = llm.llm_engine
    manager = _manager(llm)
    waits: list[float] = []
    begun: dict[str, float] = {}
    queue = list(folders)
    ends: list[float] = []
    engine.add_requests(_requests(llm, [None], options, options.rounds + 1, len(folders) * _APART * 4))
    since = 0
    while engine.has_unfinished() and (queue or begun or since < _APART):
        outputs = engine.step()
        ends.append(time.perf_counter())
        since += 1
        for name, error in manager.finished():
            if error is not None:
                raise error
            params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            engine.add_requests([EngineRequest(name, {"prompt_token_ids": [1, 2, 3]}, params, adapter=name)])
        for output in outputs:
            if output.request_id in begun and output.finished:
                waits.append(time.perf_counter() - begun.pop(output.request_id))
        if queue and not begun and since > _APART:
            folder, since = queue.pop(0), 0
            begun[folder.name] = time.perf_counter()
            manager.begin(folder.name, folder, lambda: None)
    for request_id in list(engine._groups):
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    gaps = [after - before for before, after in pairwise(ends)][_APART // 2 :]
    return {
        "loading_longest": Figure(value=max(gaps), unit="s", what="the longest step while adapters are loaded"),
        "loading_median": Figure(value=statistics.median(gaps), unit="s", what="the median of these steps"),
        "loading_first_token": Figure(
            value=max(waits), unit="s", what="from the order to load an adapter to its first token", values=tuple(waits)
        ),
    }


def _gaps(llm: LLM, adapters: list[str | None], options: argparse.Namespace, turn: int) -> Iterator[float]:
    """Serve sequences that use `adapters` in turn, and return the seconds between decode steps."""
    engine: Any = llm.llm_engine
    engine.add_requests(_requests(llm, adapters, options, turn, options.steps + 8))
    return step_gaps(engine.step, engine.has_unfinished, options.sequences)


def _requests(
    llm: LLM, adapters: list[str | None], options: argparse.Namespace, turn: int, tokens: int
) -> list[EngineRequest]:
    draw = random.Random(turn)
    vocab = llm.loaded.limits.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [
        EngineRequest(
            f"{turn}-{place}-{time.monotonic_ns()}",
            {"prompt_token_ids": [draw.randrange(vocab) for _ in range(_PROMPT)]},
            params,
            adapter=adapters[place % len(adapters)],
        )
        for place in range(options.sequences)
    ]


def _manager(llm: LLM) -> Any:
    manager = getattr(llm.llm_engine, "adapters", None)
    if manager is None:
        raise SystemExit("the artifact was compiled for no adapters: compile-model --max-loras")
    return manager


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
