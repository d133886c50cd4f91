"""Measure the memory that a call allocates, by running it on meta tensors."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that torch allocates inside its `with` block.

    `live` is the number of bytes that are allocated now, and `peak` the maximum so far.
    """

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


# The bytes of number arguments. Torch makes each a tensor while the call runs: 8 bytes, and again in the dtype of the
# other operand. The dispatcher does not see them, but only a few exist at a time, so this constant bounds them.
_NUMBERS = 64


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def peak_bytes(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the peak bytes that a run of `call` allocates, including its results.

    `call` runs on the meta device, on tensors without data. Scratch memory inside a kernel is not counted, unless
    `call` allocates a tensor for it. Errors of `call` are raised, for example if it reads data.
    """
    counted = Allocations()
    with torch.no_grad(), torch.device("meta"), counted:
        call(*args, **kwargs)
    return counted.peak + _NUMBERS
