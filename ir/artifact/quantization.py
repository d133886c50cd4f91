"""The schema of quantization.json: how a compile quantized the weights, and what that changed on a calibration text."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_FROZEN = ConfigDict(frozen=True, extra="forbid")
_Count = Annotated[int, Field(ge=0, lt=1 << 50)]

QUANTIZATION = "quantization.json"


class QuantizedLinear(BaseModel):
    """A weight that was quantized with a calibration text.

    weight    the name of the param before it was quantized
    layer     the number of its layer; None outside layers
    format    its storage format
    bytes     the bytes that store it
    error     the change of the linear's result, root mean square, relative to the result
    scaled    whether its input channels are scaled
    """

    model_config = _FROZEN
    weight: str
    layer: int | None
    format: str
    bytes: _Count
    error: float
    scaled: bool = False


class LayerChoice(BaseModel):
    """The format that `--quantize auto` chose for the linears of one layer.

    layer    the number of the layer; None for linears outside layers
    format   the chosen format; None if the weights keep their numbers
    kl       the mean KL divergence, in nats, when only this layer has the smallest format
    """

    model_config = _FROZEN
    layer: int | None
    format: str | None
    kl: float


class QuantizationRecord(BaseModel):
    """How the weights were quantized with a calibration text.

    scheme         the option `quantize`
    method         "rtn", "gptq", "awq" or "smoothquant"
    text           the option `calibrate`: "builtin", or the name of a file
    tokens         tokens whose activations the method used
    held_out       tokens of other parts of the text, on which the model was measured
    kl             the mean KL divergence of next-token distributions from those of the unquantized model, in nats
    perplexity     the perplexity of the held-out tokens, with quantized weights
    reference      their perplexity with the original weights
    max_kl         the option `max_kl`; None without it
    linears        the quantized weights
    layers         the choices of `auto`; empty for another scheme
    """

    model_config = _FROZEN
    scheme: str
    method: str
    text: str
    tokens: _Count
    held_out: _Count
    kl: float
    perplexity: float
    reference: float
    max_kl: float | None = None
    linears: tuple[QuantizedLinear, ...]
    layers: tuple[LayerChoice, ...] = ()
