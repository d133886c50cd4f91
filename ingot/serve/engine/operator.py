"""Pause and resume a running engine, put it to sleep, reset its cache, profile it: the orders of an operator."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Literal, get_args

from ingot.ir.errors import EngineDeadError, RequestError
from ingot.serve.engine.client import Action, EngineClient
from ingot.serve.engine.page_cache import drop_from_page_cache, read_into_page_cache
from ingot.serve.engine.replicas import ready_engines
from ingot.serve.engine.served_engine import ServedEngine

# Requests in flight end with an error, are served first, or wait until the engine goes on.
Mode = Literal["abort", "wait", "keep"]
MODES: tuple[str, ...] = get_args(Mode)
log = logging.getLogger("ingot.serve")


class Operator:
    """Carries out what an operator wants, in all replicas of the model. All methods raise EngineDeadError if none is
    ready.

    engine       the engine, or the replicas
    artifact     the artifact's folder
    profile_dir  the folder of profiles; None: profiles are refused
    """

    def __init__(self, engine: ServedEngine, artifact: Path, profile_dir: Path | None) -> None:
        self._engine, self._artifact, self._profile_dir = engine, artifact, profile_dir
        # Two orders at a time would leave it open which of them holds. `resume` takes no turn: it ends a long pause.
        self._turn = asyncio.Lock()

    @property
    def sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return any(engine.state == "sleeping" for engine in self._engine.engines)

    @property
    def paused(self) -> bool:
        """Return whether the engine is paused."""
        return self._engine.paused

    async def pause(self, mode: Mode, *, clear_cache: bool) -> None:
        """Let the engine run no steps until `resume`. New requests wait until then.

        mode         what happens to requests in flight: "abort" ends them with EngineDeadError, "wait" serves them
                     first, "keep" stops them until `resume`
        clear_cache  empty the prefix cache; no effect with "keep"

        Raises RequestError if `resume` is called before the pause has come about.
        """
        async with self._turn:
            await self._pause(mode)
            if clear_cache and mode != "keep":
                await self._engine.reset_prefix_cache()

    async def resume(self) -> None:
        """Let the engine go on. No effect on an engine that is not paused."""
        await self._order("resume")
        self._set_paused(False)

    async def sleep(self, level: int, mode: Mode) -> None:
        """End the engine process, which frees all its memory, and also its GPU context.

        level  1: read the weights into the kernel's page cache, from which `wake` loads them quickly; 2: remove them
               from the page cache too
        mode   "abort" or "wait", as in `pause`. There is no "keep": sleep discards the KV cache
        """
        async with self._turn:
            if not self.sleeping:
                if mode == "wait":
                    await self._pause(mode)
                    self._set_paused(False)  # of the engine that wakes
                engines = self._all_ready()
                await asyncio.gather(*(engine.suspend() for engine in engines))
            await asyncio.to_thread(read_into_page_cache if level == 1 else drop_from_page_cache, self._artifact)
            log.info("the engine sleeps, level %d", level)

    async def wake(self) -> None:
        """Start the engine again, and return when it is ready. No effect on an engine that does not sleep."""
        async with self._turn:
            await asyncio.gather(*(engine.wake() for engine in self._living()))

    async def reset_prefix_cache(self, *, aborts: bool) -> bool:
        """Empty the prefix cache. Return False if requests run, and keep their engine's cache. With `aborts`, end them
        first, with EngineDeadError."""
        if aborts:
            self._abort_all("its cache is reset")
        return await self._engine.reset_prefix_cache()

    async def start_profile(self) -> None:
        """Begin to record what the engine runs. Raises RequestError if a profile is being recorded."""
        self._folder()
        await self._order("profile")

    async def stop_profile(self) -> list[Path]:
        """End the recording, and return the new files that have it, in Chrome's trace format: one for each engine."""
        name = f"ingot-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}"
        engines = ready_engines(self._engine.engines)
        several = len(self._engine.engines) > 1
        paths = [self._folder() / (f"{name}-{engine.index}.json" if several else f"{name}.json") for engine in engines]
        orders = (engine.order("stop_profile", str(path)) for engine, path in zip(engines, paths, strict=True))
        await asyncio.gather(*orders)
        return paths

    def _folder(self) -> Path:
        if self._profile_dir is None:
            raise RequestError(
                "the server has no folder for profiles",
                expected="a server with --profile-dir",
                hint="start it with --profile-dir DIR",
            )
        return self._profile_dir.absolute()

    async def _pause(self, mode: Mode) -> None:
        if mode == "abort":
            self._abort_all("it pauses")
        await self._order("pause" if mode == "keep" else "drain")
        self._set_paused(True)

    def _abort_all(self, reason: str) -> None:
        what = f"the operator of the server ended the request, because {reason}"
        for engine in self._engine.engines:
            engine.fail_all(EngineDeadError(what, hint="send the request again"))

    async def _order(self, action: Action) -> None:
        """Let all ready engines carry out an order. One that starts does so when it is ready, by `paused`."""
        await asyncio.gather(*(engine.order(action) for engine in ready_engines(self._engine.engines)))

    def _set_paused(self, paused: bool) -> None:
        for engine in self._engine.engines:
            engine.paused = paused

    def _living(self) -> list[EngineClient]:
        """Return the engines that are not given up; all, if all are."""
        return [engine for engine in self._engine.engines if engine.state != "dead"] or [*self._engine.engines]

    def _all_ready(self) -> list[EngineClient]:
        """Return the engines that are not given up. Raises EngineDeadError if one of them is not ready."""
        for engine in (engines := self._living()):
            if engine.state != "ready":
                raise engine.not_ready()
        return engines
