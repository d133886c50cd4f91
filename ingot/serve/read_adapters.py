"""Read the LoRA adapters of a call of `LLM`. Importing this imports torch."""

from collections.abc import Sequence

from ingot.ir.errors import RequestError
from ingot.runtime.adapters.lora_request import LoRARequest
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.pooling_engine import PoolingEngine


def read_adapters(engine: Engine | PoolingEngine, given: Sequence[LoRARequest | None]) -> list[str | None]:
    """Return the names of adapters, after reading those that the engine lacks.

    Raises RequestError if the artifact was compiled for no adapters, or if one of `given` is malformed. Raises
    AdapterError for an adapter that cannot be used.
    """
    for one in given:
        if one is None:
            continue
        if not isinstance(one, LoRARequest) or not isinstance(one.lora_name, str) or not one.lora_name:
            raise RequestError(
                f"the adapter is {one!r:.80}", where="lora_request", expected="a LoRARequest with a name"
            )
        if not isinstance(engine, Engine) or engine.adapters is None:
            raise RequestError(
                "adapters for an artifact that was compiled for none",
                where="lora_request",
                expected="no adapter",
                hint="compile with --max-loras, or LLM(checkpoint, enable_lora=True)",
            )
        engine.adapters.add(one.lora_name, one.lora_path)
    return [None if one is None else one.lora_name for one in given]
