"""What the server asks of the engines of a model: of one engine, or of several replicas."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from ingot.serve.engine.client import EngineClient, EngineLimits, State
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import VectorKind
from ingot.serve.engine.vector_answer import VectorAnswer


class ServedEngine(Protocol):
    """The engines of a served model. `EngineClient` describes the methods, and `engines` has one client for each."""

    @property
    def state(self) -> State: ...

    @property
    def paused(self) -> bool: ...

    @property
    def engines(self) -> Sequence[EngineClient]: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def options(self) -> dict[str, Any]: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def vectors(self) -> VectorKind | None: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def max_loras(self) -> int: ...

    @property
    def adapters(self) -> Mapping[str, str]: ...

    async def start(self) -> None: ...

    def state_change(self) -> Coroutine[Any, Any, object]: ...

    def add(
        self,
        prompt_ids: list[int],
        params: dict[str, Any],
        num_sequences: int,
        *,
        stream: bool,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> DeltaStream: ...

    def pool(
        self, prompt_ids: list[int], params: dict[str, Any], *, priority: int = 0, cache_salt: str | None = None
    ) -> VectorAnswer: ...

    def check_room(self, num_sequences: int) -> None: ...

    async def reset_prefix_cache(self) -> bool: ...

    async def load_adapter(self, name: str, folder: str) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def close(self) -> None: ...
