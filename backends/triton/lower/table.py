"""Every lowering of a single call, by the printed name of what it lowers."""

from collections.abc import Mapping

from ingot.backends.triton.lower import (
    attention,
    elementwise,
    gate,
    linear,
    logprobs,
    norm,
    penalties,
    rope,
    sampling,
    step,
)
from ingot.backends.triton.lower.call import Lowering

_MODULES = (attention, elementwise, gate, linear, logprobs, norm, penalties, rope, sampling, step)
LOWERINGS: Mapping[str, Lowering] = {name: one for module in _MODULES for name, one in module.LOWERINGS.items()}
