"""The table of lowerings of single calls, by op name, such as "linear" or "aten.add.Tensor"."""

from collections.abc import Mapping

from ingot.backends.triton.lower import elementwise, gate, norm, pool, rope, sparsity, step, streams
from ingot.backends.triton.lower.attention import choose as attention_choose
from ingot.backends.triton.lower.attention import latent_step as attention_latent_step
from ingot.backends.triton.lower.attention import paged as attention
from ingot.backends.triton.lower.attention import sparse as attention_sparse
from ingot.backends.triton.lower.attention import step as attention_step
from ingot.backends.triton.lower.call import Lowering
from ingot.backends.triton.lower.experts import experts, route
from ingot.backends.triton.lower.linear import head_linear, lora
from ingot.backends.triton.lower.linear import matmul as linear
from ingot.backends.triton.lower.quant import dequantize, round_rows
from ingot.backends.triton.lower.sampling import logprobs, penalties
from ingot.backends.triton.lower.sampling import sample as sampling

_MODULES = (
    *(attention, attention_choose, attention_latent_step, attention_sparse, attention_step, dequantize, elementwise),
    *(experts, gate, head_linear, linear),
    *(logprobs, lora, norm, penalties, pool, rope, round_rows, route, sampling, sparsity, step, streams),
)
LOWERINGS: Mapping[str, Lowering] = {name: one for module in _MODULES for name, one in module.LOWERINGS.items()}
