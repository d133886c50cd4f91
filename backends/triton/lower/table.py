"""The table of lowerings of single calls, by op name, such as "linear" or "aten.add.Tensor"."""

from collections.abc import Mapping

from ingot.backends.triton.lower import (
    attention,
    attention_latent_step,
    attention_step,
    elementwise,
    experts,
    gate,
    head_linear,
    linear,
    logprobs,
    lora,
    norm,
    penalties,
    pool,
    rope,
    route,
    sampling,
    sparsity,
    step,
    streams,
)
from ingot.backends.triton.lower.call import Lowering

_MODULES = (
    *(attention, attention_latent_step, attention_step, elementwise, experts, gate, head_linear, linear, logprobs),
    *(lora, norm, penalties, pool, rope, route, sampling, sparsity, step, streams),
)
LOWERINGS: Mapping[str, Lowering] = {name: one for module in _MODULES for name, one in module.LOWERINGS.items()}
