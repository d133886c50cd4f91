"""The bucket classes of a compile: which steps are lowered together."""

from collections.abc import Sequence

from ingot.ir.artifact.plan import FEW_TOKENS, GPU_FEW_TOKENS, BucketClass, owed_features
from ingot.ir.backend import Backend, LibraryBuilder, RegionCompiler
from ingot.ir.machine.target import Target

# By the first number of tokens. On a GPU the kernels for few tokens differ in the rows of a product that they hold:
# one, a tile of 16 (the least that tensor cores take), two and four of these.
_CLASSES = {
    "cpu": (("decode", 1), ("extend", FEW_TOKENS + 1)),
    "cuda": (("decode-1", 1), ("decode-16", 2), ("decode-32", 17), ("decode-64", 33), ("extend", GPU_FEW_TOKENS + 1)),
}
# In deterministic mode. One kernel of attention serves all steps there, and one token is a product's tile of 16. A CPU
# has one lowering for all.
_INVARIANT_CLASSES = {
    "cpu": (("any", 1),),
    "cuda": (("decode-16", 1), ("decode-32", 17), ("decode-64", 33), ("extend", GPU_FEW_TOKENS + 1)),
}
# Above these, a step that feeds one token of each sequence is still decoded: its attention reads every context once, by
# the kernels of few tokens, where those of prompts would fill a tile of 128 rows with one. Its products are those of
# many tokens. So large a class leaves attention two splits of a context, the least that a long one among short ones
# needs.
_WIDE = "decode-512", 512


def bucket_classes(
    target: Target, backends: Sequence[Backend], max_tokens: int, max_batch: int, *, deterministic: bool
) -> tuple[BucketClass, ...]:
    """The bucket classes of steps up to `max_tokens` tokens of up to `max_batch` sequences: for decode where there are
    kernels for few tokens, and for all that is larger. Only backends that emit anything tell them apart.

    In deterministic mode the classes ask their lowerings for the same bits in all of them.
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
