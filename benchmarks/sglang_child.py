"""Run SGLang on one checkpoint, in a child process that peer.py starts. peer_child.py describes the measurements."""

import time

BEGUN = time.time()

import asyncio  # noqa: E402  # the clock is read before anything is imported
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from decode_method import Prompts
    from peer_child import Opening

    from ingot.bench.drive import Progress
    from ingot.bench.workload import BenchRequest

SETTINGS = {"HF_HUB_OFFLINE": "1"}  # no network access
# Positions of its context length that no sequence may use: its scheduler accepts prompts of up to 7 less, and generates
# tokens up to 2 less (managers/tp_worker.py, get_worker_info, and managers/scheduler.py, validate and init_req_max_new_
# tokens, of 0.5.15).
KEPT_BACK = 8


def sampling(count: int) -> dict[str, object]:
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}


class DrivenSglang:
    """SGLang, with the interface that the load generator `ingot.bench.drive` uses.

    Each request is a task of `Engine.async_generate`, as in SGLang's server. SGLang's scheduler is a separate process.
    It reports tokens over a socket.
    """

    def __init__(self, engine: Any, *, by_token: bool) -> None:
        self._engine = engine
        self._by_token = by_token
        self._wanted: dict[int, int] = {}  # tokens of each request that has not ended
        self._told: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps no references to them

    def add(self, index: int, request: "BenchRequest") -> None:
        self._wanted[index] = request.output_len
        task = self._engine.loop.create_task(self._follow(index, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, index: int, request: "BenchRequest") -> None:
        params = sampling(request.output_len)
        try:
            outputs = await self._engine.async_generate(
                input_ids=list(request.prompt), sampling_params=params, stream=self._by_token
            )
            if not self._by_token:
                self._told.put_nowait((index, outputs))
                return
            async for output in outputs:
                self._told.put_nowait((index, output))
        except Exception as error:
            self._told.put_nowait((index, error))  # `step` raises it, since nothing awaits the task

    def step(self) -> "Iterator[Progress]":
        """Wait until at least one request has new tokens. Yield the progress of each request that then has new
        tokens."""
        reports = [self._engine.loop.run_until_complete(self._told.get())]
        while not self._told.empty():
            reports.append(self._told.get_nowait())
        for index, output in reports:
            yield self._progress(index, output)

    def _progress(self, index: int, output: Any) -> "Progress":
        from ingot.bench.drive import Progress

        if isinstance(output, Exception):
            raise output
        about = output["meta_info"]
        made, reason = about["completion_tokens"], about["finish_reason"]
        if reason is None:
            return Progress(index, made, finished=False)
        wanted = self._wanted.pop(index)
        error = "" if made == wanted else f"it ended after {made} of {wanted} tokens: {reason}"
        return Progress(index, made, finished=True, error=error)

    def has_unfinished(self) -> bool:
        return bool(self._wanted)


class OpenedSglang:
    def __init__(self, opening: "Opening") -> None:
        import sglang

        self._engine = sglang.Engine(
            model_path=str(opening.checkpoint),
            load_format=opening.load_format,
            skip_tokenizer_init=True,
            context_length=opening.longest + KEPT_BACK,
            mem_fraction_static=opening.memory_share,  # covers weights and cache, not activations and graphs
            disable_radix_cache=not opening.prefix_caching,
        )

    def generate(self, prompts: "Prompts", count: int) -> object:
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling(count))
        assert all(len(output["output_ids"]) == count for output in outputs)
        return outputs

    def driven(self, *, by_token: bool) -> DrivenSglang:
        return DrivenSglang(self._engine, by_token=by_token)


def main() -> None:
    # Imported here: SGLang's own processes import this file again without these folders in their path.
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
    from peer_child import measure_peer

    del sys.path[:2]  # their module names could shadow SGLang's imports
    measure_peer(BEGUN, "sglang", SETTINGS, OpenedSglang)


if __name__ == "__main__":
    main()
