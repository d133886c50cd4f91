"""The formats of weights that are quantized to floats of eight and four bits."""

import torch

from ingot.ir.formats.activations import Activations
from ingot.ir.formats.format import Format, Scales
from ingot.ir.formats.names import register_format

_FP8 = Activations("f8e4m3")
_POWERS = torch.float8_e8m0fnu

register_format(Format("fp8", "f8e4m3", (Scales(rows=0),), _FP8))
register_format(Format("fp8_per_channel_per_token", "f8e4m3", (Scales(),), _FP8))
# DeepSeek-V3 (arXiv 2412.19437, section 3.3.2): blocks of 128 x 128 for weights, groups of 128 for activations.
register_format(Format("fp8_block128", "f8e4m3", (Scales(128, 128),), Activations("f8e4m3", 128)))
# OCP Microscaling Formats 1.0: blocks of 32 with a power of two.
register_format(Format("mxfp8", "f8e4m3", (Scales(1, 32, dtype=_POWERS),), Activations("f8e4m3", 32, _POWERS)))
register_format(Format("mxfp4", "f4e2m1", (Scales(1, 32, dtype=_POWERS),), packing="low_first"))
# Blocks of 16 with a scale in f8e4m3, and a scale for the whole weight.
_NVFP4 = Scales(1, 16, dtype=torch.float8_e4m3fn), Scales(0, 0)
register_format(Format("nvfp4", "f4e2m1", _NVFP4, packing="low_first"))
register_format(Format("nf4", "nf4", (Scales(1, 64),), packing="low_first"))
