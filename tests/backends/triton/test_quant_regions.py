"""Regions around a product with a quantized weight: norms before it, gates, activations and residuals after it."""

import itertools

import pytest
import torch
from quant_calls import CLASSES, FORMS, check_region
from triton_schedules import TESTED, some

FORMATS = ("int8", "fp8", "fp8_block128", "int4_g128", "int4_g128_asym", "int8_w8a8")


@pytest.mark.parametrize("dtype", TESTED, ids=str)
@pytest.mark.parametrize(("form", "format", "rows"), some(6, itertools.product(FORMS, FORMATS, CLASSES)))
def test_regions(form: str, format: str, rows: int, dtype: torch.dtype) -> None:
    check_region(form, format, rows, dtype)
