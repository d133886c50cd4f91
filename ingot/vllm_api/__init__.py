"""vLLM's offline interface, for programs that were written for vLLM: only their imports and paths change.

    from ingot.vllm_api import LLM, EngineArgs, SamplingParams

Every name is imported from this module, also those that vLLM keeps in submodules. New programs use `ingot.LLM`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.runtime.adapters.lora_request import LoRARequest
    from ingot.runtime.engines.beams import BeamSearchOutput, BeamSearchSequence
    from ingot.runtime.engines.outputs import CompletionOutput, Logprob, RequestOutput
    from ingot.runtime.grammar.params import StructuredOutputsParams
    from ingot.vllm_api.argument_parser import FlexibleArgumentParser
    from ingot.vllm_api.beam_search_params import BeamSearchParams
    from ingot.vllm_api.engine_args import EngineArgs
    from ingot.vllm_api.llm import LLM
    from ingot.vllm_api.llm_engine import LLMEngine
    from ingot.vllm_api.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from ingot.vllm_api.pooling_params import PoolingParams
    from ingot.vllm_api.prompts import PromptType, TextPrompt, TokensPrompt
    from ingot.vllm_api.renderer import parse_model_prompt
    from ingot.vllm_api.sampling_params import SamplingParams
    from ingot.vllm_api.script_helpers import cleanup_dist_env_and_memory, load_chat_template, print_embeddings

_HERE = "ingot.vllm_api"
# Loaded on first use, so that `--help` of a script needs no torch.
_HOMES = {
    "BeamSearchOutput": "ingot.runtime.engines.beams",
    "BeamSearchSequence": "ingot.runtime.engines.beams",
    "CompletionOutput": "ingot.runtime.engines.outputs",
    "Logprob": "ingot.runtime.engines.outputs",
    "RequestOutput": "ingot.runtime.engines.outputs",
    "BeamSearchParams": f"{_HERE}.beam_search_params",
    "FlexibleArgumentParser": f"{_HERE}.argument_parser",
    "EngineArgs": f"{_HERE}.engine_args",
    "LLM": f"{_HERE}.llm",
    "LLMEngine": f"{_HERE}.llm_engine",
    "ClassificationOutput": f"{_HERE}.outputs",
    "ClassificationRequestOutput": f"{_HERE}.outputs",
    "EmbeddingOutput": f"{_HERE}.outputs",
    "EmbeddingRequestOutput": f"{_HERE}.outputs",
    "PoolingOutput": f"{_HERE}.outputs",
    "PoolingRequestOutput": f"{_HERE}.outputs",
    "ScoringOutput": f"{_HERE}.outputs",
    "ScoringRequestOutput": f"{_HERE}.outputs",
    "PoolingParams": f"{_HERE}.pooling_params",
    "LoRARequest": "ingot.runtime.adapters.lora_request",
    "PromptType": f"{_HERE}.prompts",
    "TextPrompt": f"{_HERE}.prompts",
    "TokensPrompt": f"{_HERE}.prompts",
    "parse_model_prompt": f"{_HERE}.renderer",
    "SamplingParams": f"{_HERE}.sampling_params",
    "StructuredOutputsParams": "ingot.runtime.grammar.params",
    "cleanup_dist_env_and_memory": f"{_HERE}.script_helpers",
    "load_chat_template": f"{_HERE}.script_helpers",
    "print_embeddings": f"{_HERE}.script_helpers",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "cleanup_dist_env_and_memory",
    "load_chat_template",
    "parse_model_prompt",
    "print_embeddings",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module '{_HERE}' has no attribute '{name}'")
