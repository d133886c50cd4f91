"""Logit edits of a served model, next to requests without any, on a CPU and in a GPU's captured graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import NumbersEngine
from tiny import TINY

from ingot import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("beam-search")  # which has the same artifact

NAME = "llama-plain"
VOCAB = TINY[NAME].config["vocab_size"]
ASKED: list[Any] = [{"prompt_token_ids": prompt[:20]} for prompt in TINY[NAME].prompts()[:4]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 5}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def llm(request: Any, artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> LLM:
    options: dict[str, Any] = {"max_batch": 8, "max_tokens": 64, "max_seq_len": 96}
    if request.param == "cuda":
        options |= {"target": "cuda", "backend": "triton", "dtype": "float32", "deterministic": True}
    llm = LLM(artifact(NAME, **{"backend": "reference", **options}), cuda_graphs="all")
    monkeypatch.setattr(llm._engine, "__class__", NumbersEngine)
    return llm


@pytest.mark.parametrize("asked", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_edits_hold_for_their_own_request(llm: LLM, asked: dict[str, Any]) -> None:
    """More requests than rows, so rows are used again; nothing is captured for edits."""
    plain = [output.outputs[0].token_ids for output in llm.generate(ASKED, SamplingParams(**asked))]
    captured = {name for name in llm.timings if name.startswith("graph")}
    few = [7, 50, 90, VOCAB - 1]
    words = [[50], [7, 90], [90, 90], [90, VOCAB - 1, 7]]
    edits: list[dict[str, Any]] = [
        {},
        {"allowed_token_ids": few},
        {"logit_bias": {33: 1e6}},
        {"allowed_token_ids": few, "bad_words": [" ".join(map(str, word)) for word in words]},
        {"logit_bias": {token: -1e6 for token in set(plain[1])}, "presence_penalty": 0.5},
    ]
    work = [(prompt, place, edit) for edit in edits for place, prompt in enumerate(ASKED)]
    params = [SamplingParams(**asked, **edit) for _, _, edit in work]
    outputs = llm.generate([prompt for prompt, _, _ in work], params)
    for (_, place, edit), output in zip(work, outputs, strict=True):
        found = output.outputs[0].token_ids
        assert len(found) == asked["max_tokens"]
        if not edit:
            assert found == plain[place]
        if "allowed_token_ids" in edit:
            assert set(found) <= set(few)
        if "bad_words" in edit:
            assert all(found[at : at + len(word)] != word for word in words for at in range(len(found)))
            assert len(set(found)) == 3, "all of the others are chosen"
        if "logit_bias" in edit:
            assert set(found) == {33} if 33 in edit["logit_bias"] else not set(found) & set(plain[1])
    assert {name for name in llm.timings if name.startswith("graph")} == captured
