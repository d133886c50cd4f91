"""Families that transformers has no class for: defaults of their published configuration classes, and what is derived
from sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import weights
from hf_model import hf_model
from safetensors.torch import load_file, save_file
from staged import traced
from tiny import TINY

from ingot.compile.request import Request
from ingot.ir.errors import ConfigError
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.models.architectures import read_spec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec


def dims(name: str, **changes: Any) -> DecoderSpec:
    """What a tiny checkpoint's config.json reads as, with some fields changed, or taken away where they are `...`."""
    return _spec(name, **changes).dims


def _spec(name: str, **changes: Any) -> Any:
    return read_spec({key: value for key, value in {**TINY[name].config, **changes}.items() if value is not ...})


def attention(of: DecoderSpec) -> AttentionSpec:
    block = of.layers[0].branches[0].block
    assert isinstance(block, AttentionSpec)
    return block


def test_internlm2_has_biases_unless_it_says_no() -> None:
    missing, said = (attention(dims("internlm2-tied", bias=bias)) for bias in (..., False))
    assert (missing.bias, missing.o_bias) == (True, True) and (said.bias, said.o_bias) == (False, False)
    assert dims("internlm2-tied", rms_norm_eps=...).norm.eps == 1e-6


@pytest.mark.parametrize(("given", "found"), [(..., 40), (None, 80), (20, 20)])
def test_orion_has_forty_heads_of_keys_unless_it_says_otherwise(given: Any, found: int) -> None:
    of = dims("orion-normed", hidden_size=320, num_attention_heads=80, num_key_value_heads=given)
    assert attention(of).kv_heads == found


def test_minicpm_without_factors_divides_logits_by_the_width() -> None:
    """`dim_model_base` is 1 where it is missing, as in the published configuration class."""
    of = dims("minicpm-scaled", scale_emb=..., scale_depth=..., dim_model_base=...)
    assert (of.embedding.scale, of.layers[0].scale, of.head.scale) == (1.0, pytest.approx(3**-0.5), 1 / 84)
    assert of.head.tied


@pytest.mark.parametrize("changes", [{"factor": 4.0}, {"attention_factor": 1.1}])
def test_a_factor_that_minicpms_longrope_does_not_read_is_refused(changes: dict[str, float]) -> None:
    scaling = {**TINY["minicpm-long"].config["rope_scaling"], **changes}
    with pytest.raises(ConfigError, match="longrope scales cosines and sines"):
        dims("minicpm-long", rope_scaling=scaling)


def test_teleflm_has_no_factors_unless_they_are_switched_on() -> None:
    of = dims("teleflm-mup", use_mup=...)
    assert (of.embedding.scale, of.head.scale) == (None, None)


@pytest.mark.parametrize(
    ("training", "base", "alpha"),
    [(8192, 8192, 1), (4096, 8192, 1), (8192, 4096, 3), (32768, 8192, 7), (9000, 4096, 7)],
)
def test_telechat2s_rotary_base_grows_by_steps(training: int, base: int, alpha: int) -> None:
    spec = _spec("telechat2-grown", training_seqlen=training, base_seqlen=base)
    assert spec.dims.ropes[0].theta == 10000.0 * alpha ** (14 / 12)
    assert spec.max_position == training, "the longest context is the training's"


def test_baichuans_are_told_apart_by_their_sizes() -> None:
    """Of the second generation are those with its vocabulary or its field; of 7 billion weights those of its width."""
    sizes = {"z_loss_weight": ..., "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 32}
    found = {
        (width, vocab): dims("baichuan-alibi", **sizes, hidden_size=width, vocab_size=vocab)
        for width in (4096, 5120)
        for vocab in (64000, 125696)
    }
    assert {size: of.head.normed for size, of in found.items()} == {size: size[1] == 125696 for size in found}
    assert {size: bool(of.ropes) for size, of in found.items()} == {size: size[0] == 4096 for size in found}
    for (width, _), of in found.items():
        assert (attention(of).rotary is None, attention(of).alibi is None) == (width == 5120, width == 4096)
    assert dims("baichuan-alibi", vocab_size=64001).head.normed
    with pytest.raises(ConfigError, match=r"vocab_size 64001 is neither(.|\n)*z_loss_weight"):
        dims("baichuan-alibi", vocab_size=64001, z_loss_weight=...)


@pytest.mark.slow
def test_a_rotary_model_with_a_normed_head_agrees_with_the_published_code() -> None:
    """Baichuan 2 of 7 billion weights is known by its width, which no tiny checkpoint has: one flat layer of it."""
    config = {**TINY["baichuan-alibi"].config, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "vocab_size": 41}
    tensors, ids = weights(config, seed=3), [[5, 40, 7, 7, 0, 31, 2]]
    program = traced(config).entries["main"]
    run = InterpreterRun(program, load_params(program.params, tensors.__getitem__))
    found = torch.cat(teacher_forced(program.input_types(), run, ids))
    expected = hf_model(config, tensors, torch.float32, 160)(torch.tensor(ids)).logits[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "field", "longest"),
    [
        ("internlm2-dynamic", "max_position_embeddings", 3 * 2048),
        ("minicpm-scaled", "max_position_embeddings", 2048),
        ("orion-normed", "max_position_embeddings", 4096),
        ("telechat2-grown", "training_seqlen", 8192),
        ("baichuan7b-rotary", "max_position_embeddings", 4096),
        ("baichuan-alibi", "model_max_length", 4096),
    ],
)
def test_the_context_is_the_published_default_where_it_is_missing(name: str, field: str, longest: int) -> None:
    assert _spec(name, **{field: ...}).max_position == longest


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("internlm2-tied", "model.layers.1.attention.rotary_emb.inv_freq"),
        ("orion-tied", "model.layers.1.self_attn.rotary_emb.cos_cached"),
        ("telechat2-tied", "transformer.h.1.self_attention.rotary_emb.inv_freq"),
        ("baichuan7b-rotary", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("minicpm-scaled", "lm_head.weight"),  # a copy of a tied head
        ("internlm2-tied", "output.weight"),
    ],
)
def test_tensors_that_nothing_reads_may_be_there(name: str, stray: str, tmp_path: Path) -> None:
    file = TINY[name].write(tmp_path) / "model.safetensors"
    save_file({**load_file(file), stray: torch.ones(7)}, file, metadata={"format": "pt"})
    program = Request.read(tmp_path, backend="reference").trace().entries["main"]
    assert stray not in {read for spec in program.params.values() for read in spec.recipe.sources()}
