"""`LLM.beam_search` against transformers, where the rules agree, and against plain code in float64 where not.

transformers divides a score by the number of generated tokens alone, takes an end token only from the `beam_width`
best continuations of all beams, and stops when no beam can win. Without end tokens none of it changes the result.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY

from ingot import LLM, BeamSearchParams
from ingot.ir.errors import RequestError

pytestmark = pytest.mark.xdist_group("beam-search")

NAME = "llama-plain"
PROMPTS = [prompt[:20] for prompt in TINY[NAME].prompts()[:4]]
ASKED: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
LONG = [3 + token % 50 for token in range(200)]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Any:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(checkpoint(NAME), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(artifact: Callable[..., Path]) -> LLM:
    return LLM(artifact(NAME, backend="reference", max_batch=8, max_tokens=64, max_seq_len=96))


def test_without_end_tokens_the_beams_are_transformers(llm: LLM, model: Any) -> None:
    width, count = 4, 12
    outputs = llm.beam_search(ASKED, BeamSearchParams(width, count, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            found = model.generate(
                torch.tensor([prompt]),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                length_penalty=1.0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        assert [one.tokens for one in output.sequences] == found.sequences.tolist()
        for one, score in zip(output.sequences, found.sequences_scores.tolist(), strict=True):
            assert one.cum_logprob == pytest.approx(score * count, abs=1e-3)
            assert one.finish_reason == "length" and one.text is None and len(one.logprobs) == count


def searched_by_hand(
    model: Any, prompt: list[int], params: BeamSearchParams, ends: set[int]
) -> list[tuple[list[int], float]]:
    """The rules of vLLM's `LLM.beam_search`, in float64."""

    def score(one: tuple[list[int], float]) -> float:
        return one[1] / (len(one[0]) - (one[0][-1] in ends)) ** params.length_penalty

    beams, ended = [(list(prompt), 0.0)], []
    for _ in range(params.max_tokens):
        longer = []
        for tokens, total in beams:
            with torch.no_grad():
                best = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1).topk(2 * params.beam_width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                (ended if token in ends else longer).append(([*tokens, token], total + value))
        beams = sorted(longer, key=score, reverse=True)[: params.beam_width]
    return sorted([*ended, *beams], key=score, reverse=True)[: params.beam_width]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -2.0])
def test_end_tokens_and_length_penalties_are_vllms(
    llm: LLM, model: Any, monkeypatch: pytest.MonkeyPatch, length_penalty: float
) -> None:
    params = BeamSearchParams(3, 8, length_penalty=length_penalty)
    plain = llm.beam_search(ASKED[0], BeamSearchParams(3, 8, ignore_eos=True))[0].sequences[0].tokens
    ends = {plain[-4], plain[-2]}
    monkeypatch.setattr(llm.llm_engine, "_eos_ids", frozenset(ends))
    reasons = set()
    for prompt, output in zip(PROMPTS, llm.beam_search(ASKED, params, concurrency_limit=3), strict=True):
        expected = searched_by_hand(model, prompt, params, ends)
        assert [one.tokens for one in output.sequences] == [tokens for tokens, _ in expected]
        for one, (tokens, total) in zip(output.sequences, expected, strict=True):
            assert one.cum_logprob == pytest.approx(total, abs=1e-3)
            assert one.finish_reason == ("stop" if tokens[-1] in ends else "length")
            reasons.add(one.finish_reason)
    assert "stop" in reasons


def test_beams_share_the_pages_of_their_common_tokens(llm: LLM) -> None:
    """A step computes at most the last page of each beam, whatever the length of the prompt."""
    prompt = LONG[:70]
    llm.reset_prefix_cache()
    before = llm.prefix_cache_stats
    width, count, page = 3, 6, llm.loaded.limits.page_size
    llm.beam_search({"prompt_token_ids": prompt}, BeamSearchParams(width, count, ignore_eos=True))
    after = llm.prefix_cache_stats
    computed = after.queries - after.hits - (before.queries - before.hits)
    assert computed <= len(prompt) + width * (count - 1) * page
    assert after.queries - before.queries == len(prompt) + width * sum(len(prompt) + n for n in range(1, count))


def test_the_context_ends_a_search(llm: LLM) -> None:
    """As the most tokens of a sequence do; a prompt that leaves no room is refused before anything runs."""
    most = llm.loaded.limits.max_seq_len
    long: Any = {"prompt_token_ids": LONG[: most - 2]}
    sequences = llm.beam_search(long, BeamSearchParams(2, 50, ignore_eos=True))[0].sequences
    assert [len(one.tokens) for one in sequences] == [most, most]
    with pytest.raises(RequestError, match=f"{most} tokens"):
        llm.beam_search([ASKED[0], {"prompt_token_ids": LONG[:most]}], BeamSearchParams(2, 1))
    assert not llm.llm_engine.has_unfinished() and llm.beam_search([], BeamSearchParams(2, 1)) == []


BAD = [
    {"beam_width": 0},
    {"beam_width": 11},
    {"beam_width": True},
    {"max_tokens": 0},
    {"max_tokens": None},
    {"temperature": float("nan")},
    {"length_penalty": float("inf")},
    {"length_penalty": "1"},
    {"ignore_eos": 1},
    {"include_stop_str_in_output": None},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_params(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **bad})
    (name,) = bad
    assert caught.value.where == f"BeamSearchParams.{name}" and caught.value.expected


def test_bad_calls(llm: LLM) -> None:
    params: Any = {"beam_width": 2}
    for call in (
        lambda: llm.beam_search(ASKED, params),
        lambda: llm.beam_search(ASKED, BeamSearchParams(2, 3), concurrency_limit=0),
        lambda: llm.beam_search(3, BeamSearchParams(2, 3)),  # type: ignore[arg-type]
        lambda: llm.beam_search(ASKED, BeamSearchParams(2, 3), use_tqdm="yes"),  # type: ignore[arg-type]
        lambda: llm.beam_search(["a text"], BeamSearchParams(2, 3)),
        lambda: llm.generate(ASKED, use_tqdm=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.expected and not llm.llm_engine.has_unfinished()


def test_progress_is_told_to_the_callers_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    class Bar:
        def __init__(self, *, total: int, desc: str) -> None:
            seen.append(total)

        def update(self, n: int) -> None:
            seen.append(n)

        def close(self) -> None:
            seen.append("closed")

    llm.generate(ASKED, use_tqdm=Bar)
    llm.beam_search(ASKED[:2], BeamSearchParams(2, 2), use_tqdm=Bar, concurrency_limit=1)
    assert seen == [4, 1, 1, 1, 1, "closed", 2, 1, 1, "closed"] and capsys.readouterr().err == ""
    llm.generate(ASKED, use_tqdm=True)
    assert "Processed prompts" in capsys.readouterr().err
