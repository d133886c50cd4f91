"""Ingot against transformers in float32: the same log-probabilities and the same greedy tokens.

Tiny checkpoints of every family, each compiled once per backend and served with prompts fed whole and in chunks; eight
prompts of mixed length are served together. The commit draws which a run serves: half of those that differ most, and a
twelfth of the others. Through inductor go one checkpoint of full depth and, in one run of eight, one that the commit
draws: another of full depth, or the cut of a family to one layer. Of either backend one is also served in a new
process. With --run-slow all are.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from run_seed import run_seed
from serve_artifact import STEP_TOKENS, Job, Result, serve, serve_in_new_process
from tiny import CHECKPOINTS, CUTS, QUICK, TINY

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.models.architectures import ARCHITECTURES, read_spec

SLOW = pytest.mark.slow
TOLERANCE = 1e-4  # of a log-probability
# Through inductor in every run: all biases, grouped heads, several files. In one of eight also one of half a minute.
_DRAW = random.Random(run_seed())
THROUGH_INDUCTOR = ("llama-biased", *_DRAW.sample(["qwen3-biased", *sorted(CUTS)], int(_DRAW.random() < 0.125)))
# Also served in a process that never compiled; of that nothing depends on the family, and every run has one.
IN_NEW_PROCESS = tuple(f"{family}-{kind}" for family in ("llama", "qwen3") for kind in ("plain", "biased", "scaled"))
QUICK_IN_NEW_PROCESS = {"inductor": "llama-biased", "reference": "qwen3-scaled"}
# What a run traces, and compiles by the references: what it serves in a new process too, and others. A row of commits
# sees all.
OTHERS = sorted({*TINY} - {*QUICK})
DRAWN = {
    *QUICK_IN_NEW_PROCESS.values(),
    *random.Random(run_seed()).sample(QUICK, len(QUICK) // 2),
    *random.Random(run_seed()).sample(OTHERS, len(OTHERS) // 12),
}
# One of each architecture, cuts, and those six.
INDUCTOR = (*IN_NEW_PROCESS, *CUTS, *{TINY[name].config["architectures"][0]: name for name in reversed(TINY)}.values())


def _cases(*backends: str) -> list[Any]:
    """(name, backend, place) of what is served; each checkpoint in one worker, for what it compiles."""
    cases = []
    for name in CHECKPOINTS:
        for backend in backends:
            if name not in (INDUCTOR if backend == "inductor" else TINY):
                continue
            for place in ("here", "new-process") if name in IN_NEW_PROCESS else ("here",):
                slow = name not in (THROUGH_INDUCTOR if backend == "inductor" else DRAWN)
                slow = slow or (place == "new-process" and name != QUICK_IN_NEW_PROCESS[backend])
                marks = [pytest.mark.xdist_group(f"parity-{name}"), *([SLOW] if slow else [])]
                cases.append(pytest.param(name, backend, place, marks=marks, id=f"{name}-{backend}-{place}"))
    return cases


@pytest.fixture(scope="session")
def served(
    reference: Callable[[str], Any], artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], list[Result]]:
    """What an artifact gives with prompts fed whole and in chunks, by checkpoint, backend and place."""
    known: dict[tuple[str, str, str], list[Result]] = {}

    def get(name: str, backend: str, place: str) -> list[Result]:
        key = name, backend, place
        if key not in known:
            expected, compiled = reference(name), str(artifact(name, backend=backend))
            jobs = [
                Job(compiled, expected.prompts, expected.sequences, max(expected.decided), chunked)
                for chunked in (False, True)
            ]
            if place == "here":
                known[key] = [serve(job) for job in jobs]
            else:
                known[key] = serve_in_new_process(jobs, tmp_path_factory.mktemp("serve"))
        return known[key]

    return get


def test_every_family_goes_through_inductor() -> None:
    named = {CHECKPOINTS[name].config["architectures"][0] for name in INDUCTOR}
    assert named == ARCHITECTURES.keys() - {name for family in FAMILIES.values() for name in family.aliases}


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize(("name", "backend", "place"), _cases("reference", "inductor"))
def test_artifact_agrees_with_transformers(
    name: str,
    backend: str,
    place: str,
    chunked: bool,
    reference: Callable[[str], Any],
    served: Callable[[str, str, str], list[Result]],
) -> None:
    print(f"INGOT_TEST_SEED={run_seed()}")
    expected = reference(name)
    result = served(name, backend, place)[chunked]
    error = _worst([logits.double().log_softmax(-1) for logits in result.logits], expected.logprobs)
    compared = 0
    for index, tokens in enumerate(result.tokens):
        decided = expected.decided[index]
        assert tokens[:decided] == expected.greedy(index)[:decided], f"greedy tokens of prompt {index}"
        compared += decided
    print(f"{name}, {backend}: log-probabilities within {error:.1e}, {compared} greedy tokens equal")
    assert error <= TOLERANCE
    longest = max(map(len, expected.prompts))
    if chunked:
        assert result.longest_chunk <= STEP_TOKENS < longest and result.later_chunks >= longest // STEP_TOKENS
    else:
        assert result.longest_chunk == longest and result.later_chunks == 0


@pytest.mark.parametrize(
    ("name", "backend", "place"), [case for case in _cases("inductor") if case.values[2] == "here"]
)
def test_inductor_computes_the_layers(name: str, backend: str, place: str, artifact: Callable[..., Path]) -> None:
    """What was compared above ran in compiled regions, in steps of more than a few tokens, and not in a fallback."""
    from ingot.runtime.loading.loader import load_artifact

    plan = load_artifact(artifact(name, backend=backend), num_pages=1).plan
    outside = {
        instruction.target for instruction in plan.buckets[-1].instructions if not instruction.target.startswith("exe.")
    }
    assert plan.executables
    assert not {target for target in outside if target.startswith("ingot.")} - {
        "ingot.embedding",
        "ingot.feed",
        "ingot.page_slots",
        "ingot.count_tokens",
        "ingot.kv_append",
        "ingot.qk_norm_rope_append",
        "ingot.paged_attention",
        "ingot.route",
        "ingot.sparse_mixer",
        "ingot.experts",
        "ingot.select_rows",
        "ingot.sample",
        "ingot.top_logprobs",
        "ingot.advance",
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xdist_group(f"parity-{name}"), *([] if name in DRAWN else [SLOW])])
        for name in TINY
    ],
)
def test_traced_program_agrees_with_transformers(
    name: str, reference: Callable[[str], Any], checkpoint: Callable[[str], Path]
) -> None:
    """The program that the mutations in test_mutations.py start from."""
    print(f"INGOT_TEST_SEED={run_seed()}")
    expected = reference(name)
    opened = Checkpoint.open(checkpoint(name))
    limits = Limits(expected.tiny.max_seq_len, 8, 1024)
    program = trace(read_spec(opened.config), limits).entries["main"]
    run = InterpreterRun(program, load_params(program.params, opened.read))
    logits = teacher_forced(program.input_types(), run, expected.sequences)
    assert _worst([rows.double().log_softmax(-1) for rows in logits], expected.logprobs) <= TOLERANCE


def _worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    # torch's max keeps a NaN, Python's may lose it.
    return float(torch.stack([(one - other).abs().max() for one, other in zip(found, expected, strict=True)]).max())
