"""Which tokens of `sample` are right: where one is not the reference's, the last bit of a logarithm has decided."""

import torch

from ingot.ir.ops import OPS
from ingot.ir.ops.penalties import NUM_PENALTIES, Penalties, penalized
from ingot.ir.ops.sampling import keep_mask, typical_mask, uniform

_SCORES_TELL = 1e-5  # some ulps of scores of size 16, the largest noise in float32


def wrong_token(found: torch.Tensor, *args: torch.Tensor) -> str | None:
    """The first row whose token is wrong, and why; None when all are right. `args` are those of `sample`."""
    expected = OPS["sample"].reference(*args)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
    for row in (found != expected).nonzero().flatten().tolist():
        one, other = int(found[row]), int(expected[row])
        penalties = Penalties(*args[-NUM_PENALTIES:])
        logits, temperature, top_k, top_p, min_p, typical_p, seeds, positions = (
            value[row : row + 1] for value in (penalized(args[0], penalties), *args[1:-NUM_PENALTIES])
        )
        if not (temperature > 0 and one >= 0 and other >= 0):
            return f"row {row}: {one}, expected {other}"
        scaled = (logits - logits.amax()) / temperature
        kept = keep_mask(scaled, top_k, top_p, min_p)
        if not (kept & typical_mask(scaled.masked_fill(~kept, float("-inf")), typical_p))[0, one]:
            return f"row {row}: {one} is not kept"
        scores = (scaled - torch.log(-torch.log(uniform(seeds, positions, logits.shape[1]))))[0]
        if not abs(scores[one] - scores[other]) < _SCORES_TELL:
            return f"row {row}: {one} scores {float(scores[one])}, and {other} {float(scores[other])}"
    return None
