"""A checkpoint compiled in float32 twice: for the references on a CPU, and for the kernels of a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot import compile_model
from ingot.runtime.cuda.graphs.sizes import is_capturable
from ingot.runtime.loading.loader import load_artifact


def compiled_twice(
    checkpoint: Path, folder: Path, ops: Sequence[str], *, deterministic: bool = False, **options: Any
) -> tuple[Path, Path]:
    """The artifacts for a CPU and a GPU. `options` are those of both compiles, and `deterministic` of the GPU's.

    On the GPU, Triton's kernels compute all calls of `ops`, of which there are some, and graphs can hold every step.
    """
    plain, compiled = folder / "plain.ingot", folder / "compiled.ingot"
    compile_model(checkpoint, plain, target="cpu", backend="reference", dtype="float32", **options)
    compile_model(checkpoint, compiled, target="cuda", dtype="float32", deterministic=deterministic, **options)
    buckets = load_artifact(compiled, num_pages=64).plan.buckets
    for op in ops:
        calls = [one for bucket in buckets for one in bucket.instructions if one.target == f"ingot.{op}"]
        assert calls and all(one.backend == "triton" for one in calls), op
    assert all(map(is_capturable, buckets))
    return plain, compiled
