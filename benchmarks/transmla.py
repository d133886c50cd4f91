"""Perplexity of models whose attention was converted to latent attention, after each step of the conversion.

    python benchmarks/transmla.py [CHECKPOINT]

The checkpoint is pico by default. It is converted with the text that comes with Ingot: half of it makes the matrices,
and half of it measures the perplexity, with the rounding of the stored weights and activations in float32. One rotated
key of 64 elements is kept, with several numbers of folded frequencies, and latents of several ranks.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from results import RESULTS, ROOT, Figure, print_figures, write_result

from ingot.compile.request import Request
from ingot.convert.mla.convert import Conversion
from ingot.convert.mla.sizes import check_sizes
from ingot.quantizing.texts import BUILTIN, read_text

PICO = ROOT / "models" / "pico"
ROPE_DIM = 64
FREQFOLDS = (1, 2, 4, 8)
# Of the elements that are not rotated: pico has 192.
SHARES = (1 / 2, 1 / 4)


def figures_of(
    checkpoint: Path, text: str, rope_dim: int, freqfolds: Sequence[int], shares: Sequence[float]
) -> Iterator[tuple[str, Figure]]:
    """Yield the perplexity after each step, as "fold_FREQFOLD.STEP" and "fold_FREQFOLD.rank_RANK"."""
    request = Request.read(checkpoint, target="cpu", backend="reference")
    given = read_text(text, checkpoint, request.spec.vocab_size, request.limits.max_seq_len)
    conversion = Conversion.of(request, given, lambda done, total: None)
    for fold in freqfolds:
        whole = check_sizes(conversion.heads, None, rope_dim, fold, str(checkpoint))
        for share in shares:
            sizes = check_sizes(conversion.heads, int(whole.whole * share), rope_dim, fold, str(checkpoint))
            for gate in conversion.gates(sizes, lambda done, total: None):
                name = gate.name.replace(" ", "_")
                name = f"rank_{sizes.rank}" if name == "rank_cut" else name
                key = name if name == "source" else f"fold_{fold}.{name}"
                what = f"freqfold {fold}, after {gate.name}" if name != "source" else "source"
                yield f"{key}.perplexity", Figure(value=gate.perplexity, unit="", what=f"{what}: perplexity")
                yield f"{key}.cache", Figure(value=gate.cache, unit="", what=f"{what}: cache, of the source's")
                print(f"{key}: {gate.perplexity:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=PICO)
    parser.add_argument("--name", default="transmla", help="the name of the result")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    figures = dict(figures_of(options.checkpoint, BUILTIN, ROPE_DIM, FREQFOLDS, SHARES))
    print_figures(figures)
    settings = {"model": options.checkpoint.name, "rope_dim": ROPE_DIM, "text": BUILTIN}
    print(write_result(__file__, options.name, settings, figures, packages=("torch",), folder=options.results))


if __name__ == "__main__":
    main()
