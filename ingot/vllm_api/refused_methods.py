"""Methods of vLLM's `LLM` and `LLMEngine` that Ingot does not have. Each raises RequestError with the reason."""

from collections.abc import Callable
from typing import Any, NoReturn

from ingot.ir.errors import RequestError

_WEIGHTS = "weights are part of an artifact and do not change; compile the new checkpoint"
_PROFILE = "use `ingot bench` and `ingot explain --measure`, or POST /start_profile of `ingot serve`"
_SLEEP = "delete the object to free its memory; `ingot serve` has the routes /sleep and /wake_up"
_QUEUE = "pass all prompts to `generate`, or add requests to `LLM.llm_engine` and call its `step`"
_WORKERS = "there are no worker processes that would run a function of the caller"
_MEDIA = "models take text only, so there is no such cache"

METHODS = {
    "apply_model": _WORKERS,
    "collective_rpc": _WORKERS,
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "finish_weight_update": _WEIGHTS,
    "get_metrics": "`ingot serve` has them at /metrics",
    "init_weight_transfer_engine": _WEIGHTS,
    "reset_encoder_cache": _MEDIA,
    "reset_mm_cache": _MEDIA,
    "set_tokenizer": "an artifact has the tokenizer of its checkpoint",
    "sleep": _SLEEP,
    "start_profile": _PROFILE,
    "start_weight_update": _WEIGHTS,
    "stop_profile": _PROFILE,
    "update_weights": _WEIGHTS,
    "wait_for_completion": _QUEUE,
    "wake_up": _SLEEP,
}


class RefusedMethods:
    """The methods of `METHODS`, which raise RequestError with their reason."""


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_given: Any, **_named: Any) -> NoReturn:
        raise RequestError(f"{name} is not supported", where=f"{type(self).__name__}.{name}", hint=reason)

    refuse.__name__, refuse.__doc__ = name, f"Refuse the call: {reason}. Raises RequestError."
    return refuse


for _name, _reason in METHODS.items():
    setattr(RefusedMethods, _name, _refusing(_name, _reason))
