"""The options of a compile that quantize weights, checked."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.ir.errors import OptionError
from ingot.ir.formats import FORMATS, find_format
from ingot.passes.quantize import AUTO, Quantize
from ingot.quantizing.calibrate import METHODS

# The method with a calibration text unless another is named: of all it changes predictions least.
DEFAULT_METHOD = "gptq"
_PATTERN = re.compile(r"[\w.*?\[\]!-]+")


@dataclass(frozen=True)
class QuantizeOptions:
    """How a compile quantizes weights.

    - `scheme`: the name of a storage format, or "auto" for a choice per layer
    - `method`: one of METHODS
    - `ignore`: patterns of linears that keep their weights
    - `overrides`: other formats, by pattern
    - `head`: whether the linear that computes the logits is quantized too
    - `calibrate`: "builtin", or the path of a calibration text; None: none
    - `max_kl`: for "auto", the largest KL divergence on held-out text, in nats
    """

    scheme: str
    method: str
    ignore: tuple[str, ...]
    overrides: Mapping[str, str]
    head: bool
    calibrate: str | None
    max_kl: float | None

    @staticmethod
    def read(
        scheme: str | None,
        *,
        method: str,
        ignore: Sequence[str],
        overrides: Mapping[str, str],
        head: bool,
        calibrate: str | Path | None,
        max_kl: float | None,
    ) -> "QuantizeOptions | None":
        """Check the options of `compile_model` and return them; None if nothing is quantized. Raises OptionError."""
        given = {
            "quantize_method": method != "auto",
            "quantize_ignore": bool(ignore),
            "quantize_overrides": bool(overrides),
            "quantize_head": head,
            "calibrate": calibrate is not None,
            "max_kl": max_kl is not None,
        }
        if scheme is None:
            if names := [name for name, value in given.items() if value]:
                raise OptionError(f"{names[0]} without quantize", expected=f"quantize: {AUTO}, {', '.join(FORMATS)}")
            return None
        if method not in ("auto", *METHODS):
            raise OptionError(f"unknown quantize_method '{method}'", expected=", ".join(("auto", *METHODS)))
        if scheme != AUTO:
            find_format(scheme)
        for name in overrides.values():
            find_format(name)
        for pattern in (*ignore, *overrides):
            if not _PATTERN.fullmatch(pattern):
                raise OptionError(
                    f"the pattern '{pattern}'",
                    where="quantize",
                    expected="letters, digits, and the signs . _ - * ? [ ]",
                )
        if calibrate is None and (method not in ("auto", "rtn") or scheme == AUTO):
            what = "quantize 'auto'" if scheme == AUTO else f"quantize_method '{method}'"
            raise OptionError(
                f"{what} without a calibration text",
                expected="calibrate: a file with text, or builtin",
                hint="calibrate with compile-model, and serve the artifact",
            )
        _check_max_kl(scheme, max_kl)
        return QuantizeOptions(
            scheme,
            ("rtn" if calibrate is None else DEFAULT_METHOD) if method == "auto" else method,
            tuple(ignore),
            dict(overrides),
            head,
            None if calibrate is None else str(calibrate),
            max_kl,
        )

    def pass_text(self) -> str:
        """Return the text of `--passes` that adds the pass quantize with these options."""
        fields: dict[str, Any] = {"format": self.scheme}
        if self.head:
            fields["lm_head"] = True
        if self.ignore:
            fields["ignore"] = "|".join(self.ignore)
        if self.overrides:
            fields["overrides"] = "|".join(f"{pattern}={format}" for pattern, format in self.overrides.items())
        return f"{Quantize.name}{{{', '.join(f'{name}={json.dumps(value)}' for name, value in fields.items())}}}"


def _check_max_kl(scheme: str, max_kl: float | None) -> None:
    if (scheme == AUTO) != (max_kl is not None):
        raise OptionError(
            "quantize 'auto' without max_kl" if scheme == AUTO else f"max_kl with quantize '{scheme}'",
            expected=f"both quantize '{AUTO}' and max_kl, the largest KL divergence in nats",
        )
    if max_kl is not None and (
        isinstance(max_kl, bool) or not isinstance(max_kl, int | float) or not 0 < max_kl < math.inf
    ):
        raise OptionError(f"max_kl is {max_kl!r}", expected="a number of nats above 0, such as 0.02")
