"""Ingot: compile a language model once, load it in seconds, serve it at the speed of the memory bus."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.compile.compile_report import CompileReport
    from ingot.compile.driver import compile_model
    from ingot.debug.bisect import Verdict, bisect
    from ingot.ir.errors import IngotError
    from ingot.ir.machine.target import Target
    from ingot.runtime.adapters.lora_request import LoRARequest
    from ingot.runtime.engines.beams import BeamSearchOutput, BeamSearchSequence
    from ingot.runtime.engines.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
    from ingot.runtime.grammar.params import StructuredOutputsParams
    from ingot.runtime.loading.artifact import Artifact, open_artifact
    from ingot.runtime.params.beam_search_params import BeamSearchParams
    from ingot.runtime.params.pooling_params import PoolingParams
    from ingot.runtime.params.sampling_params import SamplingParams
    from ingot.serve.async_llm import AsyncLLM
    from ingot.serve.llm import LLM

# Loaded on first use: `ingot --help` needs no torch, and serving needs no compiler.
_HOMES = {
    "CompileReport": "ingot.compile.compile_report",
    "compile_model": "ingot.compile.driver",
    "Verdict": "ingot.debug.bisect",
    "bisect": "ingot.debug.bisect",
    "IngotError": "ingot.ir.errors",
    "Target": "ingot.ir.machine.target",
    "AsyncLLM": "ingot.serve.async_llm",
    "LLM": "ingot.serve.llm",
    "LoRARequest": "ingot.runtime.adapters.lora_request",
    "Artifact": "ingot.runtime.loading.artifact",
    "open_artifact": "ingot.runtime.loading.artifact",
    "BeamSearchOutput": "ingot.runtime.engines.beams",
    "BeamSearchParams": "ingot.runtime.params.beam_search_params",
    "BeamSearchSequence": "ingot.runtime.engines.beams",
    "CompletionOutput": "ingot.runtime.engines.outputs",
    "EmbeddingOutput": "ingot.runtime.engines.outputs",
    "Logprob": "ingot.runtime.engines.outputs",
    "PoolingParams": "ingot.runtime.params.pooling_params",
    "RequestOutput": "ingot.runtime.engines.outputs",
    "SamplingParams": "ingot.runtime.params.sampling_params",
    "StructuredOutputsParams": "ingot.runtime.grammar.params",
}

__all__ = [
    "LLM",
    "Artifact",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompileReport",
    "CompletionOutput",
    "EmbeddingOutput",
    "IngotError",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "Target",
    "Verdict",
    "bisect",
    "compile_model",
    "open_artifact",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ingot' has no attribute '{name}'")
