"""`deterministic=True`: a request's logits are bitwise the same whoever else is served, and however it is fed.

tests/stress shows that for eight requests, their pages, chunks and preemptions together. Here one request meets other
company each time: none, few or many, before it or behind it, with other parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams

# One worker with tests/stress, for the artifact that they share.
pytestmark = [pytest.mark.xdist_group("stress"), pytest.mark.one_in_file(3)]

NAME = "qwen3-biased"
NEW_TOKENS = 20
VOCAB = 401


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    params: SamplingParams


def ask(seed: int, length: int, **options: Any) -> Ask:
    prompt = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Ask(prompt, SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": seed, **options}))


PROBE = ask(1, 21, temperature=0.8, top_p=0.95)
OTHERS = [
    ask(2, 1, temperature=0.0, max_tokens=3),
    ask(3, 40, temperature=1.5, min_p=0.05),
    ask(4, 16, temperature=0.0),
    ask(5, 17, temperature=0.7, top_k=7, max_tokens=9),
    ask(6, 64, temperature=1.0),
    ask(7, 5, temperature=0.0, max_tokens=30),
    ask(8, 33, temperature=0.9),
]
COMPANY: dict[str, Sequence[Ask]] = {
    "first of two": [PROBE, OTHERS[0]],
    "last of two": [OTHERS[4], PROBE],
    "first of eight": [PROBE, *OTHERS],
    "fourth of eight": [*OTHERS[:3], PROBE, *OTHERS[3:]],
    "last of eight, the others turned round": [*reversed(OTHERS), PROBE],
    "beside itself": [PROBE, *OTHERS[1:3], PROBE, PROBE],
}


@dataclass
class Watched:
    """An executor that keeps what each token was chosen from, by the request's number and the tokens before it."""

    llm: LLM
    logits: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    preempted: set[int] = field(default_factory=set)
    batches: set[int] = field(default_factory=set)

    def launch(self, inputs: Any) -> Any:
        handle = self.llm._loaded.executor.launch(inputs)
        batch = self.llm._engine._scheduler._in_flight[-1]  # scheduled just before it is launched
        self.batches.add(len(batch.requests))
        for row, request in enumerate(batch.sampled):
            number = int(request.request_id.partition("[")[0])
            self.logits.setdefault(number, {})[request.num_computed] = handle.outputs["logits"][row].clone()
            self.preempted |= {number} if request.preemptions else set()
        return handle


def serve(artifact: Path, asked: Sequence[Ask], **options: Any) -> tuple[list[list[int]], Watched]:
    llm = LLM(artifact, **options)
    watched = Watched(llm)
    llm._engine._executor = watched
    outputs = llm.generate([{"prompt_token_ids": one.prompt} for one in asked], [one.params for one in asked])
    return [output.outputs[0].token_ids for output in outputs], watched


@pytest.fixture(scope="module")
def folder(artifact: Callable[..., Path]) -> Path:
    return artifact(NAME, backend="reference", deterministic=True)


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[int], dict[int, torch.Tensor]]:
    """The probe's tokens and logits when no other sequence runs."""
    (tokens,), watched = serve(folder, [PROBE])
    assert watched.batches == {1} and len(watched.logits[0]) == len(tokens) == NEW_TOKENS
    return tokens, watched.logits[0]


def assert_same(asked: Sequence[Ask], tokens: list[list[int]], watched: Watched, alone: Any) -> None:
    for number in (number for number, one in enumerate(asked) if one is PROBE):
        assert tokens[number] == alone[0]
        assert watched.logits[number].keys() == alone[1].keys()
        for place, row in alone[1].items():
            assert torch.equal(watched.logits[number][place], row), f"logits behind {place} tokens"


@pytest.mark.parametrize("company", COMPANY)
def test_company_does_not_show(folder: Path, alone: Any, company: str) -> None:
    asked = COMPANY[company]
    tokens, watched = serve(folder, asked)
    assert max(watched.batches) == len(asked)
    assert_same(asked, tokens, watched, alone)


@pytest.mark.parametrize("budget", [8, 13])
def test_nor_do_chunks(folder: Path, alone: Any, budget: int) -> None:
    """Alone in chunks, and among others, where what is left of the budget decides how it is cut."""
    for asked in ([PROBE], COMPANY["fourth of eight"]):
        tokens, watched = serve(folder, asked, max_num_batched_tokens=budget, max_num_seqs=min(8, len(asked)))
        assert_same(asked, tokens, watched, alone)


def test_nor_does_preemption(folder: Path, alone: Any) -> None:
    """Admitted last, it is the first to give up its pages."""
    asked = [*OTHERS[3:], PROBE]
    tokens, watched = serve(folder, asked, num_kv_pages=13, max_num_batched_tokens=32)
    assert asked.index(PROBE) in watched.preempted
    assert_same(asked, tokens, watched, alone)
