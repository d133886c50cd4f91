"""Independent implementations of a model to compare with: transformers, or a user's script."""

import importlib.util
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.ir.errors import IngotError, OptionError

Logits = list[torch.Tensor]
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Digest:
    """A summary of a tensor, to find an equal tensor in another implementation.

    It is the count, sum, absolute sum and sum of squares of the elements. It does not depend on the shape or on the
    order of the elements. `module` names the module that computed the tensor.
    """

    count: int
    total: float
    absolute: float
    square: float
    module: str = ""

    @staticmethod
    def of(tensor: torch.Tensor, module: str = "") -> "Digest":
        wide = tensor.detach().double()
        return Digest(wide.numel(), float(wide.sum()), float(wide.abs().sum()), float(wide.square().sum()), module)

    def is_near(self, other: "Digest") -> bool:
        """Return whether two digests are equal up to rounding in float32.

        The relative tolerance is 1e-5, since float32 has a unit roundoff of 6e-8. Transformers computes norms and
        softmax in float32, whatever the model's dtype.
        """
        near = 1e-5
        return (
            self.count == other.count
            and abs(self.absolute - other.absolute) <= near * other.absolute + 1e-9
            and abs(self.square - other.square) <= near * other.square + 1e-9
            and abs(self.total - other.total) <= near * other.absolute + 1e-9
        )


@dataclass
class Oracle:
    """An independent implementation of a model, to compare the traced program with.

    `logits` runs requests, and returns logits [n, vocab] for each request of n tokens. `watched` runs one request, and
    returns digests of all intermediate tensors. It is None if the oracle cannot show them.

    Both functions take the checkpoint's folder, the request or requests, and the compiled context length. Some rotary
    embeddings depend on this length.
    """

    name: str
    logits: Callable[[Path, Sequence[Sequence[int]], int], Logits]
    watched: Callable[[Path, Sequence[int], int], list[Digest]] | None = None


def open_oracle(oracle: str | Path) -> Oracle:
    """Return the oracle "transformers", or the oracle that a Python file defines.

    Raises OptionError if the file is not valid, or if transformers is not installed.
    """
    if str(oracle) == TRANSFORMERS:
        if importlib.util.find_spec("transformers") is None:
            raise OptionError(
                "transformers is not installed", where="--oracle transformers", hint="pip install transformers"
            )
        return Oracle(TRANSFORMERS, _transformers_logits, _transformers_watched)
    path = Path(oracle)
    if not path.is_file():
        raise OptionError(f"there is no oracle '{oracle}'", where="--oracle", expected="transformers, or a Python file")
    function = runpy.run_path(str(path)).get("oracle")
    if not callable(function):
        raise OptionError(f"{path} defines no function 'oracle'", where="--oracle", expected="def oracle(requests)")

    def logits(folder: Path, requests: Sequence[Sequence[int]], context: int) -> Logits:
        found = function([list(request) for request in requests])
        if len(found) != len(requests):
            raise OptionError(f"oracle(requests) returned {len(found)} results", expected=str(len(requests)))
        return [torch.as_tensor(one) for one in found]

    return Oracle(str(path), logits)


def _model(folder: Path, context: int) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise IngotError(f"transformers cannot load the checkpoint: {error}", where=str(folder)) from error
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            _rotate_as_in(module, context)
    return model.eval().double()


def _rotate_as_in(rotary: torch.nn.Module, context: int) -> None:
    """Make a rotary embedding module of transformers compute as for a context of `context` tokens.

    In transformers, longrope and dynamic scaling depend on the last position of a call. In a compiled model, as in
    vLLM, they depend on the whole context length. So each call also gets the last position of the context. The row of
    this position is removed from the result.
    """

    def extended(positions: Any) -> Any:
        return torch.cat([positions, torch.full_like(positions[..., :1], context - 1)], dim=-1)

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": extended(kwargs["position_ids"])}
        return (args[0], extended(args[1]), *args[2:]), kwargs

    def leave(_: Any, __: Any, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return result[..., :-1, :]
        return type(result)(part[..., :-1, :] for part in result)

    rotary.register_forward_pre_hook(enter, with_kwargs=True)
    rotary.register_forward_hook(leave)


def _run(model: Any, request: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(request)]), use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0]


def _transformers_logits(folder: Path, requests: Sequence[Sequence[int]], context: int) -> Logits:
    model = _model(folder, context)
    return [_run(model, request) for request in requests]


def _transformers_watched(folder: Path, request: Sequence[int], context: int) -> list[Digest]:
    model, stack = _model(folder, context), [""]

    def leave(*_: Any) -> None:  # returning a value would replace the module's result
        stack.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: stack.append(name))
        module.register_forward_hook(leave)
    recorder = _Recorder(stack)
    with recorder:
        _run(model, request)
    return recorder.seen


@dataclass
class _Recorder(TorchDispatchMode):
    """A torch dispatch mode that records a digest of every op's result.

    Each digest has the name of the module that was running. Only floating-point results with two or more dims are
    recorded.
    """

    stack: list[str]
    seen: list[Digest] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
                self.seen.append(Digest.of(value, self.stack[-1]))
        return result
