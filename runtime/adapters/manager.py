"""The adapters of an engine: their names, and the slots of the device that hold their factors."""

import itertools
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ingot.ir.errors import AdapterError, IngotError
from ingot.runtime.adapters.host_adapter import HostAdapter, Places, host_adapter
from ingot.runtime.adapters.slot_copies import SlotCopies

# Adapters that the host keeps. Rank 16 of all linears of an 8B model takes 84 MB.
DEFAULT_HOST_ADAPTERS = 64
# How long the engine's thread keeps Python's lock while the reader waits for it. The reader makes some ten short calls
# for each linear. With Python's default of 5 ms it would wait as long for each of them.
_SWITCH_SECONDS = 0.0005
# Called from another thread when an adapter was read.
Wake = Callable[[], None]


class AdapterManager:
    """Reads adapters in a thread, and brings them into slots on the device when requests need them.

    A slot is given to another adapter only when no request of the scheduler uses it. Of those, the one that was used
    longest ago is replaced. All methods must be called by the engine's thread.

    places     where the factors belong
    states     the states on the device, by name
    stream     the CUDA stream on which steps run; None: on a CPU
    max_host   the most adapters that the host keeps
    """

    def __init__(
        self,
        places: Places,
        states: Mapping[str, torch.Tensor],
        stream: torch.cuda.Stream | None = None,
        max_host: int = DEFAULT_HOST_ADAPTERS,
    ) -> None:
        self.places = places
        self._states, self._max_host = states, max_host
        self._copies = None if stream is None else SlotCopies(places, states, stream)
        self._adapters: dict[str, HostAdapter] = {}
        self._slots: list[HostAdapter | None] = [None] * places.num_slots
        self._used = [0] * places.num_slots  # when a slot was last used
        self._clock = itertools.count(1)
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._reading: dict[str, Future[HostAdapter]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters that new requests can use."""
        return tuple(self._adapters)

    @property
    def running(self) -> tuple[str, ...]:
        """The names of the adapters that requests of the scheduler use."""
        return tuple(one.name for one in self._slots if one is not None and one.users)

    def find(self, name: str) -> HostAdapter:
        """Return the adapter of this name. Raises AdapterError if there is none."""
        if name not in self._adapters:
            raise AdapterError(f"there is no adapter '{name:.80}'", expected=", ".join(self._adapters)[:200] or "none")
        return self._adapters[name]

    def add(self, name: str, folder: str | Path) -> None:
        """Read an adapter, unless it is there, and wait for it. Raises AdapterError, also for a name of another
        folder."""
        if name in self._adapters and self._adapters[name].folder == Path(folder):
            return
        self._check_new(name, replaceable=True)
        self._adapters[name] = self._read(name, folder)

    def begin(self, name: str, folder: str | Path, wake: Wake) -> None:
        """Begin to read an adapter in a thread, and call `wake` there at the end; `finished` then returns it.

        Raises AdapterError if the name is in use, or if the host has too many adapters.
        """
        self._check_new(name, replaceable=False)
        self._reading[name] = self._reader.submit(self._read_in_thread, name, folder)
        self._reading[name].add_done_callback(lambda _: wake())

    def finished(self) -> list[tuple[str, IngotError | None]]:
        """Return the adapters of `begin` that are there now, with the error of those that cannot be used."""
        done = [name for name, reading in self._reading.items() if reading.done()]
        found: list[tuple[str, IngotError | None]] = []
        for name in done:
            try:
                self._adapters[name] = self._reading.pop(name).result()
                found.append((name, None))
            except IngotError as error:
                found.append((name, error))
        return found

    def remove(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on; new ones cannot. Raises AdapterError for an unknown name."""
        adapter = self.find(name)
        adapter.removed = True
        del self._adapters[name]
        self._clear(adapter)

    def place(self, adapter: HostAdapter) -> bool:
        """Bring an adapter to the device, and return whether it is there. If not, call this again later."""
        if adapter.slot < 0:
            free = [slot for slot, one in enumerate(self._slots) if one is None]
            idle = [slot for slot, one in enumerate(self._slots) if one is not None and not one.users]
            if not (candidates := free or idle) or (self._copies is not None and self._copies.busy):
                return False
            self._move_in(adapter, min(candidates, key=self._used.__getitem__))
        self._used[adapter.slot] = next(self._clock)
        return self._copies is None or self._copies.finished(adapter.slot)

    def use(self, adapter: HostAdapter) -> int:
        """Count a request that uses an adapter on the device, and return the slot. `release` ends the use."""
        adapter.users += 1
        return adapter.slot

    def release(self, adapter: HostAdapter) -> None:
        adapter.users -= 1
        self._clear(adapter)

    def _read(self, name: str, folder: str | Path) -> HostAdapter:
        return host_adapter(name, folder, self.places)

    def _read_in_thread(self, name: str, folder: str | Path) -> HostAdapter:
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            return self._read(name, folder)
        finally:
            sys.setswitchinterval(before)

    def _check_new(self, name: str, *, replaceable: bool) -> None:
        if name in self._reading or name in self._adapters:
            where = "" if name in self._reading else str(self._adapters[name].folder)
            raise AdapterError(f"the adapter '{name:.80}' is there already", where=where, expected="another name")
        if len(self._adapters) + len(self._reading) < self._max_host:
            return
        idle = [one for one in self._adapters.values() if not one.users]
        if not (replaceable and idle):
            raise AdapterError(
                f"the host has {len(self._adapters)} adapters",
                expected=f"at most {self._max_host} (max_cpu_loras)",
                hint="unload one",
            )
        self.remove(min(idle, key=lambda one: self._used[one.slot] if one.slot >= 0 else 0).name)

    def _move_in(self, adapter: HostAdapter, slot: int) -> None:
        if (before := self._slots[slot]) is not None:
            before.slot = -1
        self._slots[slot], adapter.slot = adapter, slot
        if self._copies is not None:
            self._copies.begin(adapter, slot)
            return
        for state, factors in self.places.split(adapter.factors).items():
            self._states[state][slot].copy_(factors)

    def _clear(self, adapter: HostAdapter) -> None:
        """Free the slot of an adapter that was removed and that no request uses."""
        if adapter.removed and not adapter.users and adapter.slot >= 0:
            self._slots[adapter.slot] = None
            adapter.slot = -1
