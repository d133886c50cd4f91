"""What benchmarks take of vLLM: a start is slow where the caches are empty, a token takes a millisecond."""

import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace as Fields
from typing import Any

from vllm.sampling_params import RequestOutputKind

__version__ = "0.0.1"


class SamplingParams:
    def __init__(
        self,
        *,
        temperature: float,
        max_tokens: int,
        ignore_eos: bool,
        detokenize: bool,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens, self.output_kind = max_tokens, output_kind


class LLMEngine:
    def __init__(self) -> None:
        self.open: dict[str, list[Any]] = {}

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        assert request_id not in self.open and params.output_kind != RequestOutputKind.CUMULATIVE
        assert request_id.isdigit() and len(prompt["prompt_token_ids"]) >= 4
        self.open[request_id] = [params, 0]

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> Iterator[Fields]:
        time.sleep(1e-3)
        for name in list(self.open):
            params, made = self.open[name]
            self.open[name][1] += 1
            last = made + 1 == params.max_tokens
            if params.output_kind == RequestOutputKind.DELTA:
                yield Fields(request_id=name, outputs=[Fields(token_ids=[0])], finished=last)
            elif last:
                yield Fields(request_id=name, outputs=[Fields(token_ids=[0] * params.max_tokens)], finished=True)
            if last:
                del self.open[name]


class LLM:
    def __init__(
        self,
        *,
        model: str,
        load_format: str,
        enable_prefix_caching: bool,
        max_model_len: int,
        tensor_parallel_size: int,
        **more: object,
    ) -> None:
        assert os.path.exists(f"{model}/config.json") and load_format == "dummy"
        # A test of peer.py, and one of mesh.py, which leaves shared prefixes out.
        known = (True, 5001, 1), (False, 4096, 2)
        assert (enable_prefix_caching, max_model_len, tensor_parallel_size) in known
        assert (os.environ["NCCL_NVLS_ENABLE"], os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"]) == ("0", "0")
        assert os.environ["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm", "others create multicast objects"
        assert more == {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.85}
        assert not any(os.path.exists(f"{folder}/vllm_child.py") for folder in sys.path)
        self.llm_engine = LLMEngine()
        cold = not os.path.exists(os.environ["VLLM_CACHE_ROOT"])
        os.makedirs(os.environ["VLLM_CACHE_ROOT"], exist_ok=True)
        time.sleep(0.4 if cold else 0.01)

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, *, use_tqdm: bool) -> list[Fields]:
        assert all(len(prompt["prompt_token_ids"]) == 128 for prompt in prompts)
        time.sleep(params.max_tokens * 1e-3)
        return [Fields(outputs=[Fields(token_ids=[0] * params.max_tokens)]) for _ in prompts]
