"""What benchmarks take of SGLang: a start is slow where the caches are empty, a token takes a millisecond."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

__version__ = "0.0.2"


def _tokens(params: dict[str, Any]) -> int:
    assert params.keys() == {"temperature", "max_new_tokens", "ignore_eos"}
    assert params["temperature"] == 0 and params["ignore_eos"]
    return int(params["max_new_tokens"])


def _output(made: int, of: int) -> dict[str, Any]:
    """All tokens so far, as SGLang tells of them where `incremental_streaming_output` is not asked for."""
    reason = {"type": "length", "length": of} if made == of else None
    return {"output_ids": [0] * made, "meta_info": {"completion_tokens": made, "finish_reason": reason}}


class Engine:
    def __init__(
        self, *, model_path: str, load_format: str, disable_radix_cache: bool, context_length: int, **more: object
    ) -> None:
        assert os.path.exists(f"{model_path}/config.json") and load_format == "dummy"
        assert not disable_radix_cache and context_length >= 5001 + 7  # a prompt of 5000 is to fit
        assert more == {"skip_tokenizer_init": True, "mem_fraction_static": 0.85}
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert not any(os.path.exists(f"{folder}/sglang_child.py") for folder in sys.path)
        self.loop = asyncio.new_event_loop()
        cold = not os.path.exists(os.environ["TVM_FFI_CACHE_DIR"])
        os.makedirs(os.environ["TVM_FFI_CACHE_DIR"], exist_ok=True)
        time.sleep(0.4 if cold else 0.01)

    def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        assert all(len(prompt) == 128 for prompt in input_ids)
        count = _tokens(sampling_params)
        time.sleep(count * 1e-3)
        return [_output(count, count) for _ in input_ids]

    async def async_generate(self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool) -> Any:
        assert len(input_ids) >= 4
        count = _tokens(sampling_params)
        if stream:
            return self._stream(count)
        await asyncio.sleep(count * 1e-3)
        return _output(count, count)

    async def _stream(self, count: int) -> AsyncIterator[dict[str, Any]]:
        for made in range(1, count + 1):
            await asyncio.sleep(1e-3)
            yield _output(made, count)
