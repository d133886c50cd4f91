"""What a call allocates, found without computing anything: it runs on tensors that have sizes and no data."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the storages that calls in its block make: `live` bytes now, `peak` bytes at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if _is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._add(storage)
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        # The storage's Python object lives exactly as long as the storage.
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


# Numbers among a call's arguments become tensors while it runs: 8 bytes, and again in the other operand's dtype. They
# are made below the dispatcher, a few at a time.
_NUMBERS = 64


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def peak_bytes(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The most bytes that `call` holds at once, its results among them; its tensors are on the meta device.

    Exact for what goes through torch's dispatcher. A kernel's own scratch does not: on a CPU that is little, and what
    is known of it stands in the call that is given here. Raises what `call` raises when it looks at data.
    """
    counted = Allocations()
    with torch.no_grad(), torch.device("meta"), counted:
        call(*args, **kwargs)
    return counted.peak + _NUMBERS
