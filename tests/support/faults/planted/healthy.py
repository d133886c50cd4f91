"""Healthy compiles of all sorts, by seed: bisect should find no fault in them."""

import random
from typing import Any

from planted.fault import Setup
from planted.models import DEEP

_MESHED = ("llama", "llama-biased", "qwen3-grouped", "gemma2", "granite")
_FORMATTED = ("llama", "qwen3", "qwen3-grouped", "gemma2")
_EDITS = ("default", "default,-cse", "default,-merge-linears", "default,-fuse-add-rms-norm", "default,-choose-layouts")
_FORMATS = ("int8", "int8_g32", "int4_g32_asym", "int8_tensor")
_FEW = {"max_tokens": 16, "max_batch": 8}


def draw_setup(seed: str, *, slow: bool = True) -> Setup:
    """A model and options of a seed. `slow`: with regions too, which a compiler builds where its cache is cold."""
    draw = random.Random(f"healthy {seed}")
    kinds = ["reference", "kernels", "deterministic", "quantized", "mesh", "fused", *(["regions"] if slow else [])]
    weights = [5, 5, 2, 3, 2, 2, 2][: len(kinds)]
    kind = draw.choices(kinds, weights)[0]
    options: dict[str, Any] = {"backend": "reference", "dtype": draw.choice(["float32", "bfloat16", "float16"])}
    models = tuple(DEEP)
    match kind:
        case "reference":
            options["passes"] = draw.choice(_EDITS)
        case "kernels":
            options |= {"backend": "auto", **_FEW, "passes": draw.choice(_EDITS)}
        case "deterministic":
            options |= {"backend": "auto", "deterministic": True, **_FEW}
        case "quantized":
            models = _FORMATTED
            options["passes"] = f"default,quantize{{format={draw.choice(_FORMATS)}}}"
        case "mesh":
            models = _MESHED
            options["mesh"] = {"tp": 2}
        case "fused":
            options["passes"] = "default,fuse-qk-norm-rope{force=true}"
        case "regions":
            models = ("llama", "qwen3")
            options |= {"backend": "auto", "dtype": "float32"}
    return Setup(draw.choice(models), options)
