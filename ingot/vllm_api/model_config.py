"""vLLM's `ModelConfig`, as far as scripts read it."""

from dataclasses import dataclass
from typing import Literal

from ingot.runtime.engines.pooling_engine import PoolingEngine
from ingot.serve.llm import LLM


@dataclass(frozen=True)
class ModelConfig:
    """Facts about a loaded model.

    model           the artifact's folder
    max_model_len   the most tokens of a sequence, prompt and output together
    dtype           the dtype that it was compiled in, as in the artifact: bf16, f16 or f32
    runner_type     whether it generates tokens, or pools
    vocab_size      the size of its vocabulary
    """

    model: str
    max_model_len: int
    dtype: str
    runner_type: Literal["generate", "pooling"]
    vocab_size: int

    def get_vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return self.vocab_size


def model_config(llm: LLM) -> ModelConfig:
    """Return what the model of `llm` is."""
    engine, artifact = llm.llm_engine, llm.loaded.artifact
    kind: Literal["generate", "pooling"] = "pooling" if isinstance(engine, PoolingEngine) else "generate"
    dtype, vocab_size = str(artifact.manifest.model["dtype"]), llm.loaded.limits.vocab_size
    return ModelConfig(str(artifact.folder), engine.max_seq_len, dtype, kind, vocab_size)
