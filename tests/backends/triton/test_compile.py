"""What kernels may count on of the tensors that a call is passed."""

import pytest
import torch

from ingot.backends.triton.compile import is_aligned
from ingot.backends.triton.schedule import Value
from ingot.ir.types import TensorType


@pytest.mark.parametrize(
    ("shape", "dtype", "strides", "aligned"),
    [
        (("T", 2048), torch.bfloat16, None, True),
        (("T", 909), torch.float32, None, False),  # the second of two streams [2, 1, 909] begins at 3636 bytes
        (("T", 4, 6), torch.bfloat16, (72, 6, 1), False),
        (("T", 4, 64), torch.bfloat16, (768, 64, 1), True),
        (("T", 2, 84), torch.float32, (246, 84, 1), False),  # after 78 columns of the same merged matmul
        ((4544,), torch.bfloat16, None, True),  # a gain
        ((6, 512, 128), torch.bfloat16, (65536, 1, 512), True),  # matrices of heads, turned
        ((6, 26, 128), torch.bfloat16, (3328, 1, 26), False),
        (("B",), torch.float32, None, False),  # numbers of a step lie one after the other in the host's inputs
        (("B", "P"), torch.int32, None, False),
    ],
)
def test_inputs_begin_where_a_row_may(
    shape: tuple[int | str, ...], dtype: torch.dtype, strides: tuple[int, ...] | None, aligned: bool
) -> None:
    assert is_aligned(Value(TensorType(dtype, shape, strides), input=0)) is aligned
    assert is_aligned(Value(TensorType(dtype, shape, strides), buffer="b0"))
