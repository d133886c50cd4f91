"""Divide the steps of a compile into bucket classes: ranges of step sizes that share one lowering."""

from collections.abc import Sequence

from ingot.ir.artifact.plan import FEW_TOKENS, GPU_FEW_TOKENS, BucketClass, owed_features
from ingot.ir.backend import Backend, LibraryBuilder, RegionCompiler
from ingot.ir.machine.target import Target

# Name and minimum tokens of each bucket class. On a GPU the kernels for few tokens differ in the rows of a matmul tile:
# one, a tile of 16 (the minimum for tensor cores), two and four of these tiles.
_CLASSES = {
    "cpu": (("decode", 1), ("extend", FEW_TOKENS + 1)),
    "cuda": (("decode-1", 1), ("decode-16", 2), ("decode-32", 17), ("decode-64", 33), ("extend", GPU_FEW_TOKENS + 1)),
}
# The same for deterministic mode. There, one attention kernel serves all steps, and one token takes a matmul tile of
# 16. A CPU has one lowering for all steps.
_INVARIANT_CLASSES = {
    "cpu": (("any", 1),),
    "cuda": (("decode-16", 1), ("decode-32", 17), ("decode-64", 33), ("extend", GPU_FEW_TOKENS + 1)),
}
# A bucket class for large steps with one token per sequence, which still count as decode. Its attention uses the
# kernels for few tokens, which read every context once; prefill kernels would fill a tile of 128 rows with one. Its
# matmuls are those of many tokens. A class this large leaves attention two splits of a context, the minimum for a long
# context among short ones.
_WIDE = "decode-512", 512


def bucket_classes(
    target: Target, backends: Sequence[Backend], max_tokens: int, max_batch: int, *, deterministic: bool
) -> tuple[BucketClass, ...]:
    """Return the bucket classes of an artifact, smallest steps first. A class is a range of step sizes.

    Each class is compiled on its own. Together they cover steps of up to `max_tokens` tokens and `max_batch` sequences.
    Decode classes use kernels for few tokens. The class "extend" covers larger steps. If none of `backends` generates
    code, one class, "any", covers all steps. In deterministic mode, each class accepts only backends that are
    batch-invariant.
    """
    features = owed_features(deterministic=deterministic)
    if not any(isinstance(backend, LibraryBuilder | RegionCompiler) for backend in backends):
        return (BucketClass(name="any", tokens=(1, max_tokens), features=features),)
    classes = (_INVARIANT_CLASSES if deterministic else _CLASSES)[target.device]
    ends = [first - 1 for _, first in classes[1:]] + [max_tokens]
    found = [
        BucketClass(name=name, tokens=(first, min(last, max_tokens)), features=features)
        for (name, first), last in zip(classes, ends, strict=True)
        if first <= max_tokens
    ]
    name, most = _WIDE
    if target.device == "cuda" and not deterministic and max_batch >= (above := classes[-1][1]):
        found.insert(-1, BucketClass(name=name, tokens=(above, min(most, max_batch)), q_max=1))
    return tuple(found)
