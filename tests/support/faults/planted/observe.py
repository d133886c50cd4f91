"""Whether a fault can be seen at all: what a faulty artifact computes beside a healthy one, for the same requests."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hand_step import hand_step

from ingot.ir.errors import IngotError
from ingot.ir.mesh import parse_mesh, ranks
from ingot.ir.numerics.harness import MeshRun
from ingot.ir.parse import parse_programs
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.loading.weights import map_weights
from ingot.runtime.steps.step import StepInputs

_PAGES, _PAGE_SIZE = 64, 16
# One token, both sides of a page, several pages, and past every window.
_LENGTHS = (1, 16, 17, 33, 50)
_DECODED = 6
_SPARE = 3  # pages behind those that a sequence needs, which a wrong page number may name without a crash
# What moves logits by more than this, in parts of their root mean square, is no rounding: healthy logits of the deep
# checkpoints are off by 1e-5 of it in float32 and by 5e-2 in bfloat16, against float64.
_VISIBLE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.02}


@dataclass
class Seen:
    """What the steps gave: logits of every position, the other outputs, and the states at the end."""

    logits: list[torch.Tensor] = field(default_factory=list)
    others: list[torch.Tensor] = field(default_factory=list)
    crashed: str = ""


def steps(vocab: int, max_tokens: int, seed: int = 7) -> list[StepInputs]:
    """Prompts in chunks, then decoding with tokens that are given; every second sequence samples and is penalized."""
    draw = random.Random(seed)
    fed = [[draw.randrange(vocab) for _ in range(length + _DECODED)] for length in _LENGTHS]
    order = list(range(_PAGES))
    draw.shuffle(order)
    tables = [[order.pop() for _ in range(-(-len(one) // _PAGE_SIZE) + _SPARE)] for one in fed]
    done, made = [0] * len(fed), []
    while any(place < len(one) for place, one in zip(done, fed, strict=True)):
        room, batch = max_tokens, []
        for index, place in enumerate(done):
            left = _LENGTHS[index] - place
            count = min(11, left, room) if left > 0 else min(1, len(fed[index]) - place, room)
            if count > 0:
                batch.append((index, count))
                room -= count
        step = hand_step(
            [fed[index][done[index] : done[index] + count] for index, count in batch],
            [0 if done[index] == 0 else -1 for index, _ in batch],
            [index for index, _ in batch],
            [tables[index] for index, _ in batch],
            every_row=True,
        )
        _ask(step, batch, draw)
        made.append(step)
        for index, count in batch:
            done[index] += count
    return made


def _ask(step: StepInputs, batch: Sequence[tuple[int, int]], draw: random.Random) -> None:
    """Sampling and penalties for the rows of every second sequence, log-probabilities for all."""
    owners = [index for index, count in batch for _ in range(count)]
    for row, owner in enumerate(owners):
        step["num_logprobs"][row] = 3
        step["seeds"][row] = draw.randrange(1 << 31)
        if owner % 2 == 0:
            continue
        for name, value in {
            "temperature": draw.uniform(0.6, 1.6),
            "top_k": draw.randrange(5, 60),
            "top_p": draw.uniform(0.7, 0.98),
            "min_p": draw.uniform(0.01, 0.08),
            "typical_p": draw.uniform(0.7, 0.98),
            "count_rows": owner,
            "repetition": draw.uniform(1.1, 1.6),
            "frequency": draw.uniform(0.2, 0.9),
            "presence": draw.uniform(0.1, 0.8),
            "targets": draw.randrange(100),
        }.items():
            step[name][row] = value
        step["banned"][row, 0] = draw.randrange(100)
    for place, (index, _) in enumerate(batch):
        step["prompt_ends"][place] = _LENGTHS[index] if index % 2 else -1


def serve(artifact: Path) -> Seen:
    """All that the artifact computes for `steps`. An artifact that does not load raises its IngotError."""
    seen = Seen()
    manifest = open_artifact(artifact).manifest.model
    asked = steps(int(manifest["vocab_size"]), int(manifest["max_tokens"]))
    if manifest.get("mesh") is not None:
        run, states = _mesh_run(artifact, str(manifest["mesh"]))
    else:
        loaded = load_artifact(artifact, num_pages=_PAGES)
        states = loaded.executor.states

        def run(inputs: StepInputs) -> Mapping[str, torch.Tensor]:
            return loaded.executor.launch(inputs).outputs

    try:
        for inputs in asked:
            outputs = run(inputs)
            seen.logits.append(outputs["logits"].float().clone())
            seen.others += [outputs[name].clone() for name in ("tokens", "logprob_ids", "ranks")]
    except IngotError as error:
        seen.crashed = str(error)
    seen.others += [states[name].clone() for name in ("position", "last_token", "token_counts")]
    return seen


def _mesh_run(artifact: Path, mesh: str) -> tuple[MeshRun, Mapping[str, torch.Tensor]]:
    """All ranks of an artifact for a mesh, which nothing serves yet, under the interpreter."""
    opened = open_artifact(artifact)
    program = parse_programs(opened.read_text("program.ir"))[0]
    run = MeshRun(program, [map_weights(opened, rank) for rank in ranks(parse_mesh(mesh))], pages=_PAGES)
    for states in run.states:
        for state in states.values():
            state.zero_()
    return run, run.states[0]


def visible(healthy: Seen, faulty: Seen, dtype: str) -> str | None:
    """How the two differ beyond rounding, in words; None when they do not."""
    if faulty.crashed or healthy.crashed:
        return f"a step fails: {faulty.crashed or healthy.crashed}"
    one, other = torch.cat(healthy.logits), torch.cat(faulty.logits)
    if torch.equal(one, other):
        pairs = zip(healthy.others, faulty.others, strict=True)
        odd = sum(not torch.equal(left, right) for left, right in pairs)
        return f"{odd} tensors of tokens or states differ, and no logits" if odd else None
    if not bool(other.isfinite().all()):
        return "logits are not finite"
    moved = float((one - other).abs().max() / one.square().mean().sqrt())
    return f"logits move by {moved:.2g} of their size" if moved > _VISIBLE[dtype] else None
