"""Adapters while serving: their slots, requests that wait for one, and the prefix cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lora_folder import adapter_for, write_adapter
from tiny import CHECKPOINTS, compile_options

from ingot import LLM, LoRARequest, SamplingParams, compile_model
from ingot.ir.errors import AdapterError, OptionError, RequestError
from ingot.runtime.engines.engine import EngineRequest

NAME = "granite-cut"
LIMITS = {"max_batch": 4, "max_tokens": 32, "jobs": 1, "backend": "reference", "trace": "none"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
PROMPTS = CHECKPOINTS[NAME].prompts()[2:5]
pytestmark = pytest.mark.xdist_group("adapters")

Answer = tuple[list[int], list[float]]


def answers(llm: LLM, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """The tokens of each prompt, and their log-probabilities."""
    found = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, **options):
        (one,) = output.outputs
        assert one.logprobs is not None and one.finish_reason == "length"
        pairs = zip(one.logprobs, one.token_ids, strict=True)
        found.append((list(one.token_ids), [entry[token].logprob for entry, token in pairs]))
    return found


def agree(found: Answer, wanted: Answer) -> bool:
    return found[0] == wanted[0] and found[1] == pytest.approx(wanted[1], abs=1e-4)


@pytest.fixture(scope="module")
def artifact_folder(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("adapters") / "a.ingot"
    compile_model(checkpoint(NAME), output, **{**compile_options(NAME), **LIMITS}, max_loras=2, max_lora_rank=6)
    return output


@pytest.fixture
def llm(artifact_folder: Path) -> LLM:
    return LLM(artifact_folder)


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder, ends = tmp_path_factory.mktemp("peft"), [(), ("q_proj", "v_proj"), ("down_proj",), ()]
    return [
        LoRARequest(
            f"a{i}", i + 1, str(adapter_for(checkpoint(NAME), folder / f"{i}", some, seed=i, rank=3 + i, size=0.6))
        )
        for i, some in enumerate(ends)
    ]


def test_adapters_in_one_batch_equal_each_alone(llm: LLM, adapters: list[LoRARequest]) -> None:
    """More adapters than slots, so that requests wait for one; and requests without."""
    each = [None, *adapters]
    alone = [[answers(llm, [prompt], lora_request=one)[0] for prompt in PROMPTS] for one in each]
    assert not any(agree(alone[0][0], other[0]) for other in alone[1:])
    pairs = [(prompt, one) for one in range(len(each)) for prompt in range(len(PROMPTS))]
    found = answers(llm, [PROMPTS[prompt] for prompt, _ in pairs], lora_request=[each[one] for _, one in pairs])
    for answer, (prompt, one) in zip(found, pairs, strict=True):
        assert agree(answer, alone[one][prompt]), f"prompt {prompt}, adapter {one}"
    assert llm.llm_engine.adapters is not None and llm.llm_engine.adapters.running == ()


def test_the_prefix_cache_separates_adapters(llm: LLM, adapters: list[LoRARequest]) -> None:
    prompt = [{"prompt_token_ids": list(range(1, 65))}]

    def cached(one: LoRARequest | None) -> int | None:
        return llm.generate(prompt, PARAMS, lora_request=one)[0].num_cached_tokens

    assert [cached(None), cached(adapters[0]), cached(adapters[1])] == [0, 0, 0]
    assert [cached(None), cached(adapters[0]), cached(adapters[1])] == [48, 48, 48]


def test_an_adapter_that_is_removed_serves_its_requests_to_the_end(llm: LLM, adapters: list[LoRARequest]) -> None:
    engine: Any = llm.llm_engine
    (wanted,) = answers(llm, PROMPTS[:1], lora_request=adapters[0])
    engine.add_requests([EngineRequest("x", {"prompt_token_ids": PROMPTS[0]}, PARAMS, adapter="a0")])
    engine.step()
    assert engine.adapters.running == ("a0",)
    engine.adapters.remove("a0")
    with pytest.raises(AdapterError, match="there is no adapter 'a0'"):
        engine.add_requests([EngineRequest("y", {"prompt_token_ids": PROMPTS[0]}, PARAMS, adapter="a0")])
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == wanted[0]
    assert engine.adapters.running == () and engine.adapters.names == ()


def test_a_request_that_waits_for_a_slot_can_be_aborted(llm: LLM, adapters: list[LoRARequest]) -> None:
    engine: Any = llm.llm_engine
    for one in adapters[:3]:
        engine.adapters.add(one.lora_name, one.lora_path)
    long = SamplingParams(temperature=0.0, max_tokens=40)
    names = [one.lora_name for one in adapters[:3]]
    engine.add_requests([EngineRequest(name, {"prompt_token_ids": [1, 2]}, long, adapter=name) for name in names])
    engine.step()
    assert set(engine.adapters.running) == {"a0", "a1"}
    assert engine.occupancy.waiting == 1 and engine.waiting_adapters == ("a2",)
    assert engine.abort("a2").outputs[0].finish_reason == "abort"
    assert engine.abort("a0").outputs[0].finish_reason == "abort"
    engine.add_requests([EngineRequest("z", {"prompt_token_ids": [1, 2]}, long, adapter="a2")])
    while engine.has_unfinished():
        engine.step()
    assert engine.adapters.running == ()


def test_later_requests_do_not_keep_a_slot_from_one_for_ever(llm: LLM, adapters: list[LoRARequest]) -> None:
    engine: Any = llm.llm_engine
    for one in adapters[:3]:
        engine.adapters.add(one.lora_name, one.lora_path)
    short = SamplingParams(temperature=0.0, max_tokens=3)
    ended: list[str] = []

    def send(name: str, adapter: str) -> None:
        engine.add_requests([EngineRequest(name, {"prompt_token_ids": [1, 2]}, short, adapter=adapter)])

    send("0", "a0")
    send("1", "a1")
    engine.step()
    send("waits", "a2")
    for number in range(2, 400):
        if "waits" in ended:
            break
        send(str(number), f"a{number % 2}")
        ended += [output.request_id for output in engine.step() if output.finished]
    assert "waits" in ended
    for name in list(engine._groups):
        engine.abort(name)


def test_adapters_are_read_while_others_run(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    manager: Any = llm.llm_engine.adapters
    woken: list[int] = []
    manager.begin("good", adapters[0].lora_path, lambda: woken.append(1))
    manager.begin("bad", tmp_path / "nowhere", lambda: woken.append(2))
    found: dict[str, Any] = {}
    while len(found) < 2:
        found |= dict(manager.finished())
    assert woken == [1, 2] and found["good"] is None and isinstance(found["bad"], AdapterError)
    assert manager.names == ("good",)
    with pytest.raises(AdapterError, match="there already"):
        manager.begin("good", adapters[0].lora_path, lambda: None)


def test_what_cannot_be_served_is_refused(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    big = write_adapter(tmp_path / "big", {"model.layers.0.self_attn.q_proj": (84, 84)}, rank=16)
    other = write_adapter(tmp_path / "other", {"model.layers.0.self_attn.q_proj": (9, 9)})
    strange = write_adapter(tmp_path / "strange", {"model.layers.7.self_attn.q_proj": (84, 84)})
    huge = write_adapter(tmp_path / "huge", {"model.layers.0.self_attn.q_proj": (84, 84)}, lora_alpha=1e300)
    assert json.loads((huge / "adapter_config.json").read_text())["lora_alpha"] == 1e300
    for folder, said in ((big, "rank 16"), (other, "make a matrix"), (strange, "does not compute"), (huge, "1e+300")):
        with pytest.raises(AdapterError, match=said.replace("+", r"\+")):
            answers(llm, PROMPTS, lora_request=LoRARequest("x", 9, str(folder)))
    answers(llm, PROMPTS[:1], lora_request=adapters[0])
    with pytest.raises(AdapterError, match="there already"):
        answers(llm, PROMPTS, lora_request=LoRARequest("a0", 1, str(other)))
    with pytest.raises(RequestError, match="2 adapters for 3 prompts"):
        answers(llm, PROMPTS, lora_request=[None, None])
    with pytest.raises(RequestError, match="the adapter is 7"):
        answers(llm, PROMPTS, lora_request=[7, None, None])


def test_adapters_can_be_turned_off(artifact_folder: Path, adapters: list[LoRARequest]) -> None:
    with pytest.raises(RequestError, match="compiled for none"):
        answers(LLM(artifact_folder, enable_lora=False), PROMPTS, lora_request=adapters[0])
    with pytest.raises(OptionError, match="max_cpu_loras"):
        LLM(artifact_folder, max_cpu_loras=1)
