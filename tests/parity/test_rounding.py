"""What float32 hides: in bfloat16 norms and scaled embeddings round where transformers rounds, bit for bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from tiny import TINY
from transformers import CONFIG_MAPPING

from ingot.models.architectures import read_spec
from ingot.models.blocks.decoder import Decoder, DecoderSpec
from ingot.models.blocks.embedding import EmbeddingSpec
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.params import Place, declaration

# Of each family that transformers knows by its name, and can make without other libraries.
APART = {family.model_type for family in FAMILIES.values() if family.oracle is not None}
KNOWN = {*CONFIG_MAPPING} - APART
WITH_NORMS = {TINY[name].family: name for name in reversed(TINY) if TINY[name].config["model_type"] in KNOWN}
# The share of numbers of a layer norm that torch rounds another way, since it adds up in another order. One rounding
# more shows in a quarter of them.
OTHER_SUMS = 1e-3


def _dims(folder: Path) -> DecoderSpec:
    return read_spec(json.loads((folder / "config.json").read_text())).dims


def _config(folder: Path):
    import transformers

    return transformers.AutoConfig.from_pretrained(folder)


def _theirs(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    config = _config(folder)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture)(config).to(dtype).eval()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WITH_NORMS.values(), ids=WITH_NORMS)
def test_norms_and_embeddings_round_like_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    dims, dtype = _dims(checkpoint(name)), torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    theirs = _theirs(checkpoint(name), dtype)
    gains = torch.randn(dims.hidden, generator=generator).to(dtype)
    x = torch.randn(64, dims.hidden, generator=generator).to(dtype)
    with torch.no_grad():
        if dims.norm is not None:
            last_norm = theirs.get_submodule(f"{dims.names.place}.{dims.norm.stored}")
            if dims.norm.gains:
                last_norm.weight.copy_(gains)
            found, expected = _norm(dims.norm, gains, dtype)(x), last_norm(x)
            assert _parted(found, expected) <= (OTHER_SUMS if dims.norm.kind == "layer" else 0)
            changed = _norm(replace(dims.norm, wide=not dims.norm.wide), gains, dtype)(x)
            if dims.norm.gains and not dims.norm.bias:
                assert _parted(changed, expected) > 10 * OTHER_SUMS, "NormSpec.wide shows nothing"
        tokens = torch.arange(dims.vocab, dtype=torch.int32)
        embedded = theirs.get_input_embeddings()(tokens)
        assert torch.equal(_embedded(dims, theirs, dtype), _multiplied(dims, theirs, embedded))
        if isinstance(dims.embedding, EmbeddingSpec) and dims.embedding.rounded:
            exact = replace(dims, embedding=replace(dims.embedding, rounded=False))
            assert not torch.equal(_embedded(exact, theirs, dtype), embedded), "EmbeddingSpec.rounded shows nothing"


def _parted(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found != expected).double().mean())


def _norm(spec: NormSpec, gains: torch.Tensor, dtype: torch.dtype) -> Norm:
    norm = Norm(spec, Place("model", dtype), len(gains))
    declared = declaration(norm.weight)
    assert declared is not None
    norm.weight.data = declared.recipe.execute(lambda stored: gains).to(norm.weight.dtype)
    if norm.bias is not None:
        norm.bias.data.zero_()  # as transformers makes it
    return norm


def _embedded(dims: DecoderSpec, theirs: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    with torch.device("meta"):
        scale = Decoder(dims, dtype, 16).embed.scale
    rows = theirs.get_input_embeddings().weight
    return rows if scale is None else rows * scale


def _multiplied(dims: DecoderSpec, theirs: torch.nn.Module, embedded: torch.Tensor) -> torch.Tensor:
    """Gemma's embeddings come scaled, Granite scales them in the model's forward."""
    multiplier = getattr(theirs.base_model, "embedding_multiplier", None)
    return embedded if multiplier is None else embedded * multiplier
