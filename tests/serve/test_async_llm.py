"""`AsyncLLM`: the outputs of `LLM`, in asyncio; aborts and cancelled tasks free pages; an engine that dies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from thread_server import EngineThread

from ingot import LLM, AsyncLLM, IngotError, SamplingParams
from ingot.ir.errors import EngineDeadError, OptionError, QueueFullError, RequestError
from ingot.serve.engine import client
from ingot.serve.engine.client import EngineLimits
from ingot.serve.engine.messages import Ready, frame
from ingot.serve.engine.place import Place

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.usefixtures("engine_thread"), pytest.mark.one_in_file(3)]
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


def run(artifact: Path, body: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    async def inside() -> None:
        async with AsyncLLM(artifact, **options) as llm:
            await body(llm)

    asyncio.run(inside())


def flat(logprobs: Any) -> list[float]:
    """Ids, ranks and values of log-probabilities, in order. Requests in other steps round differently."""
    return [
        number
        for entry in logprobs or ()
        if entry is not None
        for token, one in entry.items()
        for number in (token, one.rank, one.logprob)
    ]


async def freed(llm: AsyncLLM) -> None:
    """Waits until no request runs and no page is held."""
    async with asyncio.timeout(20):
        while llm.engine.num_unfinished or llm.engine.stats.running or llm.engine.stats.pages_held:
            await asyncio.sleep(0.005)


def test_outputs_equal_those_of_llm(chat_artifact: Path) -> None:
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=9, n=3, seed=4),
        SamplingParams(max_tokens=30, seed=1, stop=["e"], include_stop_str_in_output=True, min_tokens=2),
    ]
    prompts = ["one", {"prompt_token_ids": [5, 6, 7]}, "three"]
    expected = LLM(chat_artifact).generate(prompts, params)

    async def body(llm: AsyncLLM) -> None:
        async def one(index: int) -> Any:
            outputs = [output async for output in llm.generate(prompts[index], params[index], f"r{index}")]
            assert all(not output.finished for output in outputs[:-1]) and len(outputs) > 2
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            assert lengths == sorted(lengths), "earlier outputs stay as they were"
            return outputs[-1]

        made = await asyncio.gather(*(one(index) for index in range(3)))
        for index, (output, other) in enumerate(zip(made, expected, strict=True)):
            assert output.request_id == f"r{index}" and output.prompt == other.prompt and output.finished
            assert output.prompt_token_ids == other.prompt_token_ids
            for one, same in zip(output.outputs, other.outputs, strict=True):
                assert (one.index, one.text, one.finish_reason, one.stop_reason) == (
                    *(same.index, same.text),
                    *(same.finish_reason, same.stop_reason),
                )
                assert one.token_ids == list(same.token_ids)
                assert one.cumulative_logprob == pytest.approx(same.cumulative_logprob, rel=1e-5)
                assert flat(one.logprobs) == pytest.approx(flat(same.logprobs), rel=1e-5)
            assert flat(output.prompt_logprobs) == pytest.approx(flat(other.prompt_logprobs), rel=1e-5)

    run(chat_artifact, body)


def test_leaving_cancelling_and_aborting_free_the_pages(chat_artifact: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        generator = llm.generate("a", LONG)
        await anext(generator)
        await generator.aclose()
        await freed(llm)

        async def consume() -> int:
            return len([output async for output in llm.generate("b", LONG, "b")])

        task = asyncio.create_task(consume())
        await _running(llm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await freed(llm)

        task = asyncio.create_task(consume())
        await _running(llm)
        await llm.abort("b")
        assert await task < 4000
        await llm.abort("unknown")
        await freed(llm)
        assert llm.engine.stats.steps < LONG.max_tokens, "no request has run to its end"
        assert await llm.reset_prefix_cache()

    run(chat_artifact, body)


async def _running(llm: AsyncLLM) -> None:
    async with asyncio.timeout(10):
        while not llm.engine.stats.running:
            await asyncio.sleep(0.005)


def test_bad_requests_fail_alone(chat_artifact: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        good = llm.generate("a", SamplingParams(max_tokens=50, ignore_eos=True), "good")
        await anext(good)
        for prompt, params in (
            ("", None),
            ([260], None),
            ([1] * 5000, None),
            ("a", SamplingParams(stop_token_ids=[999])),
        ):
            with pytest.raises(RequestError):
                await anext(llm.generate(prompt, params))
        with pytest.raises(RequestError, match="in use"):
            await anext(llm.generate("a", None, "good"))
        with pytest.raises(RequestError, match="priority"):
            await anext(llm.generate("a", None, priority=1))
        assert [output async for output in good][-1].finished

    run(chat_artifact, body)


def test_a_full_queue_and_a_dead_engine(chat_artifact: Path) -> None:
    """Two run, one waits, and a fourth is refused."""

    async def body(llm: AsyncLLM) -> None:
        async def consume() -> None:
            async for _ in llm.generate("a", LONG):
                pass

        tasks = [asyncio.create_task(consume()) for _ in range(3)]
        await _running(llm)
        for params in (LONG, SamplingParams(n=9)):
            with pytest.raises(QueueFullError):
                await anext(llm.generate("a", params))
        EngineThread.started[-1].kill()
        for task in tasks:
            with pytest.raises(EngineDeadError):
                await task
        with pytest.raises(EngineDeadError, match="starting"):
            await anext(llm.generate("a"))
        while llm.engine.state != "ready":
            await llm.engine.state_change()
        assert [output async for output in llm.generate("a", SamplingParams(max_tokens=2))][-1].finished

    run(chat_artifact, body, limits=EngineLimits(max_waiting=1), max_num_seqs=2)


def test_an_engine_that_hangs_is_killed(chat_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine reads no message and sends only that it is ready."""

    class Hanging:
        def __init__(self, connection: socket.socket, place: Place) -> None:
            self._connection = connection.dup()
            self._connection.sendall(frame(Ready(8, {})))

        def kill(self) -> None:
            self._connection.close()

        def wait(self) -> None:
            pass

    engines = iter((Hanging, EngineThread))
    monkeypatch.setattr(client, "start_process", lambda connection, place: next(engines)(connection, place))

    async def body(llm: AsyncLLM) -> None:
        generator = llm.generate("a", LONG)
        with pytest.raises(EngineDeadError):
            async for _ in generator:
                pass
        assert llm.engine.restarts == 1

    run(chat_artifact, body, limits=EngineLimits(step_timeout=1.0))


@pytest.mark.slow
def test_a_checkpoint_is_compiled_and_found_again(chat_artifact: Path) -> None:
    checkpoint = chat_artifact.with_name("tiny")
    options = {"backend": "reference", "jobs": 1, "max_batch": 4, "max_tokens": 64, "max_seq_len": 128}
    texts: list[str] = []

    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        texts.append([output async for output in llm.generate("ab", params)][-1].outputs[0].text)
        assert llm.model.artifact != chat_artifact and llm.model.max_seq_len == 128

    for _ in range(2):
        run(checkpoint, body, **options)
    (expected,) = LLM(chat_artifact).generate(["ab"], SamplingParams(max_tokens=4, temperature=0.0))
    assert texts == [expected.outputs[0].text] * 2


@pytest.mark.parametrize(
    ("options", "error"),
    [({"max_num_seqs": 99}, OptionError), ({"jobs": 1}, OptionError), ({"cuda_graphs": "often"}, OptionError)],
)
def test_bad_options(chat_artifact: Path, options: dict[str, Any], error: type[IngotError]) -> None:
    async def body(llm: AsyncLLM) -> None:
        pytest.fail("it started")

    with pytest.raises(error):
        run(chat_artifact, body, **options)


def test_a_sequence_is_no_longer_than_the_option_says(chat_artifact: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        assert llm.model.max_seq_len == 8
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        outputs = [output async for output in llm.generate({"prompt_token_ids": [3, 4, 5]}, params)]
        assert len(outputs[-1].outputs[0].token_ids) == 5
        with pytest.raises(RequestError, match="at most 7"):
            async for _ in llm.generate({"prompt_token_ids": [3] * 9}, params):
                pass

    run(chat_artifact, body, max_model_len=8)
    with pytest.raises(OptionError, match="max_model_len is 0"):
        run(chat_artifact, body, max_model_len=0)


def test_a_lower_priority_number_is_served_first(chat_artifact: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        ended: list[int] = []

        async def one(priority: int) -> None:
            async for _ in llm.generate("a", SamplingParams(max_tokens=12, ignore_eos=True), priority=priority):
                pass
            ended.append(priority)

        await asyncio.gather(*(one(priority) for priority in (0, 7, 2, -1)))
        assert ended in ([-1, 0, 2, 7], [0, -1, 2, 7])  # the first one may have begun

    run(chat_artifact, body, scheduling_policy="priority", max_num_seqs=1)
