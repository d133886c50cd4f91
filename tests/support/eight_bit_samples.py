"""The samples of ops over KV caches, with caches of f8e4m3."""

from dataclasses import replace

import torch

from ingot.ir.ops import OPS, Sample

OVER_CACHES = ("append_attention", "kv_append", "paged_attention", "partial_attention", "qk_norm_rope_append")
FLOAT8 = torch.float8_e4m3fn


def eight_bit_samples(name: str, dtype: torch.dtype, seed: int = 0) -> list[Sample]:
    """Without scales and with them; keys and values that are written go beyond what eight bits hold."""
    if name not in OVER_CACHES:
        return []
    op = OPS[name]
    found = []
    for sample in op.samples(torch.Generator().manual_seed(seed), dtype):
        shared = sample.kwargs.get("value_width") is not None or op.bind(sample.args, sample.kwargs).get("v", 0) is None
        for scales in ({}, {"k_scale": 0.3, "v_scale": 0.3 if shared else 1.7}):

            def change(name: str, value: object) -> object:
                if name == "kv":
                    return value.to(FLOAT8)  # type: ignore[attr-defined]
                return 300 * value if name == "k" else value  # type: ignore[operator]

            args, kwargs = op.changed(sample.args, dict(sample.kwargs), change)
            found.append(replace(sample, args=args, kwargs={**kwargs, **scales}))
    return found
