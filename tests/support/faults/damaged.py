"""Artifacts that a test damages: what serving them does, and what it refuses."""

from pathlib import Path

import pytest

from ingot import LLM, SamplingParams
from ingot.ir.errors import ArtifactError, IngotError

# The artifacts that the parity tests compile too, in the worker that has them.
reference = pytest.mark.xdist_group("parity-llama-plain")
inductor = pytest.mark.xdist_group("parity-llama-biased")


def run(artifact: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    LLM(artifact).generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8] * 20}], params)


def refusal(artifact: Path, kind: type[IngotError] = ArtifactError) -> str:
    with pytest.raises(IngotError) as caught:
        run(artifact)
    assert isinstance(caught.value, kind), repr(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def put(file: Path, data: bytes) -> None:
    """Replace a file by another: this process may have mapped the one that is there."""
    file.unlink()
    file.write_bytes(data)
