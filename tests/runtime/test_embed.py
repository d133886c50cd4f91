"""Vectors of a causal model: prompts in pieces over a paged cache, or whole and without one; what is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooled_decoder import pool_by
from staged import interpreted

from ingot import LLM, IngotError, PoolingParams, SamplingParams, bisect, compile_model
from ingot.bench.engine import open_engine
from ingot.ir import ops
from ingot.ir.errors import GenerationError, OptionError, PassError, RequestError
from ingot.ir.features import FedSequence, fed_of, step_values
from ingot.runtime.engines.pooling_engine import PoolingEngine

pytestmark = [pytest.mark.xdist_group("embed"), pytest.mark.one_in_file(3)]
PICO = Path(__file__).parents[2] / "models" / "pico"
LIMITS: dict[str, Any] = {"backend": "reference", "max_batch": 3, "max_tokens": 24, "max_seq_len": 64}
TEXTS = ["def f(x):", "import os", "class Stack:\n    def push(self, item):\n        self.items.append(item)\n", "x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Artifacts of sequences in pieces and whole, and the traced program."""
    folder, made = tmp_path_factory.mktemp("embed"), {}
    for name, attributes in (("pieces", {"whole": 0}), ("whole", {"unit": 1})):
        with pytest.MonkeyPatch.context() as patch:
            pool_by(patch, **attributes)
            report = compile_model(PICO, folder / name, check_numerics=name == "whole", **LIMITS)
            assert report.no_golden_run == "no entry returns logits, which a golden run compares"
            made[name] = folder / name
            made["traced"] = interpreted(PICO, **LIMITS)
    yield made


def hidden(traced: Any, ids: list[int]) -> torch.Tensor:
    """The last hidden state of a sequence, by the traced program."""
    inputs = step_values(traced.program.input_types(), fed_of([FedSequence(0, ids, 0, 0)], 1))
    last: torch.Tensor = traced(inputs)["hidden"][-1].float()
    return last


def close(found: list[float], wanted: torch.Tensor) -> bool:
    """In bfloat16, where chunks and pages round their sums in another order."""
    return F.cosine_similarity(torch.tensor(found), wanted, dim=0).item() > 0.9995


@pytest.mark.slow
def test_pipeline_stages_return_the_same_vectors(folders: dict[str, Any], tmp_path: Path) -> None:
    """The first stage of a model that pools has no instruction after the vectors come back from the last one."""
    with pytest.MonkeyPatch.context() as patch:
        pool_by(patch, whole=0)
        compile_model(PICO, tmp_path / "two", mesh={"pp": 2}, **LIMITS)
    found, wanted = (
        LLM(folder, num_kv_pages=8, max_num_batched_tokens=10).embed(TEXTS)
        for folder in (tmp_path / "two", folders["pieces"])
    )
    assert [one.embedding for one in found] == [one.embedding for one in wanted]


def test_prompts_in_pieces(folders: dict[str, Any]) -> None:
    llm = LLM(folders["pieces"], num_kv_pages=8, max_num_batched_tokens=10)
    assert llm.loaded.plan.memory.groups
    outputs = llm.embed(TEXTS)
    assert max(out.num_prompt_tokens for out in outputs) > 20, "the prompt is not cut"
    for out, text in zip(outputs, TEXTS, strict=True):
        assert out.prompt == text and out.finished
        assert close(out.embedding, hidden(folders["traced"], out.prompt_token_ids))
    again = llm.embed({"prompt_token_ids": outputs[2].prompt_token_ids})[0]
    assert again.num_cached_tokens == 16 and close(again.embedding, torch.tensor(outputs[2].embedding))
    full = llm.embed({"prompt_token_ids": list(range(64))})[0]  # as long as a sequence may be
    assert close(full.embedding, hidden(folders["traced"], list(range(64))))
    assert llm.llm_engine.occupancy.pages_held == 0 and llm.llm_engine.occupancy.running == 0


def test_whole_prompts(folders: dict[str, Any]) -> None:
    llm = LLM(folders["whole"])
    assert not llm.loaded.plan.memory.groups
    asked = [PoolingParams(), PoolingParams(normalize=False), PoolingParams(dimensions=5), PoolingParams(5, False)]
    outputs = llm.embed([TEXTS[0]] * 4, asked)
    wanted = hidden(folders["traced"], outputs[0].prompt_token_ids)
    for out, vector in zip(
        outputs, (F.normalize(wanted, dim=0), wanted, F.normalize(wanted[:5], dim=0), wanted[:5]), strict=True
    ):
        assert torch.allclose(torch.tensor(out.embedding), vector, rtol=0.05, atol=0.05 * float(vector.abs().max()))
    engine = llm.llm_engine
    assert isinstance(engine, PoolingEngine)
    engine.add_request("a", TEXTS[0])
    engine.add_request("b", TEXTS[1])
    aborted = engine.abort("a")
    assert aborted is not None and aborted.finish_reason == "abort" and aborted.embedding == []
    found = [out for _ in range(3) for out in engine.step()]
    assert [out.request_id for out in found] == ["b"] and not engine.has_unfinished()


def test_a_vector_that_is_not_finite_is_an_error(folders: dict[str, Any]) -> None:
    llm = LLM(folders["whole"])
    llm.loaded.executor.params["norm.weight"].fill_(float("inf"))
    with pytest.raises(GenerationError, match="the request failed: the model returned numbers that are not finite"):
        llm.embed("x")
    assert not llm.llm_engine.has_unfinished()


REFUSED: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "more than a step feeds": (lambda llm: llm.embed({"prompt_token_ids": [1] * 25}), "all of them in one step"),
    "nothing": (lambda llm: llm.embed(["x", {"prompt_token_ids": []}]), "the prompt is empty"),
    "tokens": (lambda llm: llm.generate("x"), "vectors and no tokens"),
    "a stream of tokens": (lambda llm: llm.stream("x"), "vectors and no tokens"),
    "more than there is": (lambda llm: llm.embed("x", PoolingParams(dimensions=257)), "257 dimensions of a vector"),
    "none of it": (lambda llm: PoolingParams(dimensions=0), "dimensions = 0"),
    "other parameters": (lambda llm: llm.embed("x", [SamplingParams()]), "parameters of type SamplingParams"),
    "fewer parameters": (lambda llm: llm.embed(["x", "y"], [PoolingParams()]), "1 pooling params for 2 prompts"),
    "a priority": (lambda llm: llm.embed("x", priority=[1]), "priority 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(folders: dict[str, Any], case: str) -> None:
    llm = LLM(folders["whole"])
    ask, said = REFUSED[case]
    with pytest.raises(RequestError, match=said) as caught:
        ask(llm)
    assert caught.value.expected
    assert not llm.llm_engine.has_unfinished()


@pytest.mark.parametrize("ask", [bisect, open_engine])
def test_what_asks_for_logits_or_tokens_is_refused(
    folders: dict[str, Any], ask: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool_by(monkeypatch, unit=1)
    with pytest.raises(OptionError, match="makes vectors") as caught:
        ask(folders["whole"])
    assert caught.value.expected


def test_a_model_that_samples_has_no_vectors(tmp_path: Path) -> None:
    compile_model(PICO, tmp_path / "a.ingot", **LIMITS)
    llm = LLM(tmp_path / "a.ingot", num_kv_pages=4)
    with pytest.raises(RequestError, match="tokens and no vectors") as caught:
        llm.embed("x")
    assert "ending 'pool'" in caught.value.expected and caught.value.hint


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"pooling": "mean", "whole": 0}, "pooling=mean needs every token of a sequence in one step"),
        ({"pooling": "max"}, "unknown pooling 'max'"),
        ({"pooling": 3}, "the attribute 'pooling' of the ending 'pool' is 3"),
        ({"scale": 3}, "no attribute 'scale'"),
    ],
    ids=str,
)
def test_attributes_that_do_not_fit(
    attributes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool_by(monkeypatch, **attributes)
    with pytest.raises(IngotError, match=said):
        compile_model(PICO, tmp_path / "a.ingot", **LIMITS)


def test_pieces_of_what_looks_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool_by(monkeypatch, whole=0)
    monkeypatch.setattr("ingot.models.blocks.attention.ops", SimpleNamespace(**{**vars(ops), "attention": _ahead}))
    with pytest.raises(PassError, match="with the mask bidirectional a token sees later ones"):
        compile_model(PICO, tmp_path / "a.ingot", **LIMITS)
    pool_by(monkeypatch)
    compile_model(PICO, tmp_path / "b.ingot", deterministic=True, **LIMITS)
    alone, beside = (LLM(tmp_path / "b.ingot").embed(texts)[-1] for texts in (TEXTS[:1], TEXTS[1::-1]))
    assert alone.embedding == beside.embedding
    with pytest.raises(OptionError, match="without a paged KV cache"):
        LLM(tmp_path / "b.ingot", enable_prefix_caching=True)


def _ahead(*args: Any, **options: Any) -> torch.Tensor:
    attended: torch.Tensor = ops.attention(*args, **{**options, "mask": "bidirectional"})
    return attended
