"""The LoRA adapters of the engine process: loading while requests run, and unloading."""

from collections.abc import Mapping
from typing import Any

from ingot.error_text import encode_error
from ingot.ir.errors import IngotError, RequestError
from ingot.serve.engine.channel import Channel
from ingot.serve.engine.messages import Done, LoadAdapter, UnloadAdapter


class AdapterOrders:
    """Loads and unloads adapters, and answers the server's messages about them.

    engine    the engine of the process
    channel   to the server; it gets a `Done` for each message
    """

    def __init__(self, engine: Any, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._numbers: dict[str, int] = {}  # by the name of an adapter that is being read

    def load_all(self, adapters: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Load adapters, folders by name, before the engine is ready. Return the errors of those that cannot be used,
        by name."""
        failed: dict[str, dict[str, str]] = {}
        for name, folder in adapters.items():
            try:
                self._manager().add(name, folder)
            except IngotError as error:
                failed[name] = encode_error(error)
        return failed

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter. `finish` answers when it is there."""
        try:
            self._manager().begin(message.name, message.folder, self._channel.wake)
            self._numbers[message.name] = message.number
        except IngotError as error:
            self._channel.send(Done(message.number, encode_error(error)))

    def unload(self, message: UnloadAdapter) -> None:
        """Forget an adapter. Requests that use it run to their end."""
        try:
            self._manager().remove(message.name)
            self._channel.send(Done(message.number, None))
        except IngotError as error:
            self._channel.send(Done(message.number, encode_error(error)))

    def finish(self) -> None:
        """Answer for the adapters that were read. The engine process calls this between two steps."""
        if not self._numbers:
            return
        for name, error in self._manager().finished():
            self._channel.send(Done(self._numbers.pop(name), None if error is None else encode_error(error)))

    @property
    def max_loras(self) -> int:
        """The adapters that the device holds at once; 0 if the engine serves none."""
        manager = getattr(self._engine, "adapters", None)
        return 0 if manager is None else int(manager.places.num_slots)

    @property
    def running(self) -> list[str]:
        """The names of the adapters that requests use, for the metrics."""
        manager = getattr(self._engine, "adapters", None)
        return [] if manager is None else list(manager.running)

    @property
    def waiting(self) -> list[str]:
        """The names of the adapters that requests wait for, for the metrics."""
        manager = getattr(self._engine, "adapters", None)
        return [] if manager is None else list(self._engine.waiting_adapters)

    def _manager(self) -> Any:
        manager = getattr(self._engine, "adapters", None)  # an engine for vectors has none
        if manager is None:
            raise RequestError(
                "the artifact was compiled for no adapters, or they are turned off",
                expected="an artifact of compile-model --max-loras N",
            )
        return manager
