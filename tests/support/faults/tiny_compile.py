"""A compile of a tiny checkpoint by the reference backend."""

from pathlib import Path
from typing import Any

from ingot import compile_model


def compile_tiny(checkpoint: Path, output: Path, **options: Any) -> None:
    compile_model(
        checkpoint, output, **{"backend": "reference", "max_batch": 8, "max_tokens": 64, "jobs": 1, **options}
    )
