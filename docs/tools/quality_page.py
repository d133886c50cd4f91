"""The part of docs/benchmarks.md on the quality of quantized weights: the tables of benchmarks/quality.py."""

from collections.abc import Iterator

from markdown_table import table
from results import Figure, Result
from units import quantity

TITLE = "Perplexity and KL divergence of quantized weights"
HEAD = """\
`python benchmarks/quality.py --stdlib FOLDER`: [pico](../models/pico/README.md) on {windows} windows of {length} tokens
that its training held out. Methods other than rtn are calibrated with the text that comes with Ingot. Bytes are those
of all params, with the embedding in bfloat16.
"""
AUTO = """\
`--quantize auto` on three small models that the script trains: the KL divergence in float32 on the held-out half of
the calibration text, which the bound is for, and the same with bfloat16 activations, which add their own rounding.
"""


def quality_section(result: Result) -> Iterator[str]:
    """Yield the tables of a result of quality.py."""
    figures = result.figures
    if "steps" in result.settings:
        yield from _auto(figures)
        return
    yield HEAD.format(**result.settings)
    base = figures["bf16.none.perplexity"].value
    names = [name.removesuffix(".perplexity") for name in figures if name.endswith(".perplexity")]
    rows = [
        ("bf16", "–", f"{base:.3f}", "", "", ""),
        *(_row(figures, name, base) for name in names if name[:5] != "bf16."),
    ]
    yield from table(("format", "method", "perplexity", "change", "KL divergence, nats", "bytes"), rows)


def _auto(figures: dict[str, Figure]) -> Iterator[str]:
    yield AUTO
    yield from table(
        ("model", "bound", "KL divergence, nats", "in bfloat16", "bytes, of the original"),
        (_auto_row(figures, name.removesuffix(".again")) for name in figures if name.endswith(".again")),
    )


def _row(figures: dict[str, Figure], name: str, base: float) -> tuple[str, ...]:
    format, _, method = name.rpartition(".")
    perplexity, kl, stored = (figures[f"{name}.{part}"].value for part in ("perplexity", "kl", "bytes"))
    shown = f"KV cache in {format.removeprefix('kv_')}" if format.startswith("kv_") else format
    method = {"none": "–", "token": "scales per token"}.get(method, method)
    change = f"{100 * (perplexity / base - 1):+.2f} %"
    return shown, method, f"{perplexity:.3f}", change, f"{kl:.5f}", quantity(stored, "B")


def _auto_row(figures: dict[str, Figure], name: str) -> tuple[str, ...]:
    model, _, bound = name.removeprefix("auto_").partition(".")
    kl, again, share = (figures[f"{name}.{part}"].value for part in ("kl", "again", "bytes"))
    return model, bound, f"{kl:.5f}", f"{again:.5f}", f"{100 * share:.0f} %"
