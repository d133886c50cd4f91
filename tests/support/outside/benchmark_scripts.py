"""The scripts in `benchmarks/`, and their shapes made tiny."""

import importlib
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def config_of(shape: str, **changes: Any) -> dict[str, Any]:
    """A shape of the benchmarks, made tiny."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoints = importlib.import_module("random_checkpoint")
    found: dict[str, Any] = checkpoints.config_of(
        shape, **{**sizes, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 512, **changes}
    )
    return found
