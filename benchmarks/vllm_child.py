"""Run vLLM on one checkpoint, in a child process that peer.py starts. peer_child.py describes the measurements."""

import time

BEGUN = time.time()

import sys  # noqa: E402  # the clock is read before anything is imported
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from decode_method import Prompts
    from peer_child import Opening

    from ingot.bench.drive import Progress
    from ingot.bench.workload import BenchRequest

# A mixture of experts needs no compiler but Triton's on an H200, and no network. There vLLM 0.25.1 and 0.33.0 choose by
# themselves:
# - bfloat16: their own Triton kernels, with the tile sizes of a file for the GPU if it has one (oracle/unquantized.py)
# - GPT-OSS in MXFP4: the triton_kernels of OpenAI that come with them (oracle/mxfp4.py); sinks by FlashAttention 3
# - DeepSeek's latent attention: FlashAttention 3 (platforms/cuda.py)
# These kernels are compiled in a first start. vLLM can also choose experts at random, whatever the router says
# (VLLM_MOE_ROUTING_SIMULATION_STRATEGY). That is not used: both engines compute the checkpoint's router.
#
# No network access. FlashInfer's sampler would first compile itself with nvcc. NVLink multicast stays off, in NCCL, in
# torch's symmetric memory and in FlashInfer's all-reduce, whose backends "mnnvl" and "auto" create multicast objects.
SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class DrivenVllm:
    """vLLM, with the interface that the load generator `ingot.bench.drive` uses.

    It drives vLLM's engine as vLLM's server and `LLM.generate` do.
    """

    def __init__(self, llm: Any, *, by_token: bool) -> None:
        self._engine = llm.llm_engine
        self._by_token = by_token
        self._made: dict[int, int] = {}

    def add(self, index: int, request: "BenchRequest") -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self._by_token else RequestOutputKind.FINAL_ONLY,
        )
        self._made[index] = 0  # tokens so far: an output has only the new ones
        self._engine.add_request(str(index), {"prompt_token_ids": list(request.prompt)}, params)

    def step(self) -> "Iterator[Progress]":
        from ingot.bench.drive import Progress

        for output in self._engine.step():
            index = int(output.request_id)
            self._made[index] += len(output.outputs[0].token_ids)
            yield Progress(index, self._made[index], output.finished)

    def has_unfinished(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


class OpenedVllm:
    def __init__(self, opening: "Opening") -> None:
        import vllm

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=str(opening.checkpoint),
            load_format=opening.load_format,
            skip_tokenizer_init=True,
            max_model_len=opening.longest,
            gpu_memory_utilization=opening.memory_share,  # covers weights, cache and activations
            enable_prefix_caching=opening.prefix_caching,
            tensor_parallel_size=opening.tensor_parallel,
        )

    def generate(self, prompts: "Prompts", count: int) -> object:
        params = self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)
        return outputs

    def driven(self, *, by_token: bool) -> DrivenVllm:
        return DrivenVllm(self._llm, by_token=by_token)


def main() -> None:
    # Imported here: vLLM's own processes import this file again without these folders in their path.
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
    from peer_child import measure_peer

    del sys.path[:2]  # their module names could shadow vLLM's imports
    measure_peer(BEGUN, "vllm", SETTINGS, OpenedVllm)


if __name__ == "__main__":
    main()
