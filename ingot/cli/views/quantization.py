"""Show how weights were quantized with a calibration text, and which of them lose most."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ingot.cli.console import console, print_table, size_text, table
from ingot.ir.artifact.quantization import QUANTIZATION, QuantizationRecord, QuantizedLinear
from ingot.ir.errors import ArtifactError
from ingot.runtime.loading.artifact import Artifact

if TYPE_CHECKING:
    from rich.console import Console

# Linears that a compile's report lists.
_MOST = 5


def quantization_of(artifact: Artifact) -> QuantizationRecord | None:
    """Return the record of an artifact's calibration; None without one. Raises ArtifactError if it is malformed."""
    if all(entry.path != QUANTIZATION for entry in artifact.manifest.files):
        return None
    try:
        return QuantizationRecord.model_validate(artifact.read_json(QUANTIZATION))
    except ValueError as error:
        raise ArtifactError(f"{QUANTIZATION} is malformed: {error}", where=str(artifact.folder)) from None


def quantization_text(record: QuantizationRecord) -> str:
    """Return a line about a calibration: formats, method, and the change of predictions."""
    formats = Counter(one.format for one in record.linears)
    names = ", ".join(f"{count} linears {name}" for name, count in formats.most_common()) or "no linear"
    return (
        f"{names}, by {record.method} with {record.tokens} tokens ({record.text}); KL divergence {record.kl:.4g} nats, "
        f"perplexity {record.reference:.4g} → {record.perplexity:.4g} on {record.held_out} held-out tokens"
    )


def print_sensitive(out: "Console", record: QuantizationRecord) -> None:
    """Print the linears whose results change most, for a compile's report."""
    worst = sorted(record.linears, key=lambda one: -one.error)[:_MOST]
    if worst:
        out.print("\nLinears that quantizing changes most", style="bold")
        print_table(out, _linears(worst))


def print_quantization(artifact: Artifact) -> None:
    """Print all that is known about how an artifact's weights were quantized. Raises ArtifactError without a record."""
    record, out = _required(artifact), console()
    out.print(quantization_text(record), markup=False, soft_wrap=True)
    if record.layers:
        out.print(f"\nFormats of layers, for a KL divergence of at most {record.max_kl} nats", style="bold")
        rows = [
            ("outside layers" if one.layer is None else one.layer, one.format or "original", f"{one.kl:.3g}")
            for one in record.layers
        ]
        print_table(out, table(("layer", "format", "KL divergence of this layer alone in the smallest format>"), rows))
    out.print("\nLinears", style="bold")
    print_table(out, _linears(record.linears))


def quantization_json(artifact: Artifact) -> dict[str, Any]:
    """Return the record of an artifact's calibration as JSON values. Raises ArtifactError without a record."""
    return _required(artifact).model_dump(mode="json")


def _required(artifact: Artifact) -> QuantizationRecord:
    record = quantization_of(artifact)
    if record is None:
        raise ArtifactError(
            "the artifact records no calibration",
            where=str(artifact.folder),
            expected="an artifact that was compiled with --quantize and --calibrate",
        )
    return record


def _linears(linears: Sequence[QuantizedLinear]) -> Any:
    rows = [
        (one.weight, one.format, size_text(one.bytes), f"{100 * one.error:.2f} %", "yes" if one.scaled else "")
        for one in linears
    ]
    return table(("weight", "format", "size>", "change of results>", "channels scaled"), rows)
