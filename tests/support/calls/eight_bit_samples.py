"""The samples of ops over KV caches, with caches of f8e4m3."""

from dataclasses import replace

import torch

from ingot.ir.ops import OPS, Sample

# Ops that move the rows of a cache.
_MOVERS = ("move_slots", "state_copy", "state_move", "state_zero")
OVER_CACHES = ("append_attention", "kv_append", "paged_attention", "partial_attention", "qk_norm_rope_append")
FLOAT8 = torch.float8_e4m3fn


def eight_bit_samples(name: str, dtype: torch.dtype, seed: int = 0) -> list[Sample]:
    """Without scales and with them; keys and values that are written go beyond what eight bits hold."""
    op = OPS[name]
    if name in _MOVERS:
        given = op.samples(torch.Generator().manual_seed(seed), dtype)
        return [replace(sample, args=(sample.args[0].to(FLOAT8), *sample.args[1:])) for sample in given]
    if name not in OVER_CACHES:
        return []
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
