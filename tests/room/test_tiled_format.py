"""A weight format that is a permutation of the numbers needs one file: it registers the packing and the format."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sharded import open_model
from staged import logits_of, pass_context, staged
from tiny_checkpoint import Tiny

from ingot import LLM, SamplingParams, bisect, compile_model, open_artifact
from ingot.cli.views.weights import print_weights
from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import InternalError, OptionError
from ingot.ir.formats import FORMATS, PACKINGS, Format, Packing, dequantize, quantize, register_format, register_packing
from ingot.ir.numerics.tolerances import compare
from ingot.ir.program import Model, Stage
from ingot.passes.manager import run_pipeline
from ingot.passes.pipeline import edit_pipeline, pipeline_for

PASSES, MESH = "default,quantize{format=tiles16}", {"tp": 2}
LIMITS = {"backend": "reference", "target": "cpu", "max_batch": 4, "max_tokens": 64, "max_seq_len": 96}
MODEL = Tiny(
    "llama-tiled",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 151,
        "rms_norm_eps": 0.01,
        "rope_theta": 1000.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 160,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    seed=9,
)
PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5, 17, 3, 60, 2, 41], [11], list(range(40)))]
# Row r of a tile begins at its column r, so that a column lies in no two rows at one place.
SWIZZLE = torch.tensor([[16 * row + (row + column) % 16 for column in range(16)] for row in range(16)]).flatten()


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """[N, K] as [N / 16, K / 16, 256]."""
    tiles = matrix.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2).flatten(2)
    return tiles[:, :, SWIZZLE.to(matrix.device)]


def unpack(stored: torch.Tensor) -> torch.Tensor:
    tiles = stored[:, :, SWIZZLE.argsort().to(stored.device)].unflatten(2, (16, 16))
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


@pytest.fixture(scope="module", autouse=True)
def tiles() -> Iterator[Format]:
    """All that the format needs."""
    register_packing(Packing("tiles16", (16, 16), (256,), pack, unpack))
    yield register_format(Format("tiles16", packing="tiles16"))
    del FORMATS["tiles16"], PACKINGS["tiles16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("tiled") / "checkpoint")


@pytest.fixture(scope="module")
def opened(folder: Path) -> tuple[Model, Callable[[str], torch.Tensor]]:
    return open_model(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_product_is_that_of_the_plain_weight(dtype: torch.dtype, tiles: Format) -> None:
    x, weight, bias = torch.randn(5, 32).to(dtype), torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype)
    (packed,) = quantize(weight, tiles).values()
    assert packed.shape == (3, 2, 256) and torch.equal(dequantize({"weight": packed}, tiles), weight)
    for reference in (ops.quant_linear.reference, ops.quant_linear.rowwise):
        plain = ops.linear.reference if reference is ops.quant_linear.reference else ops.linear.rowwise
        assert torch.equal(reference(x, packed, bias=bias, format="tiles16"), plain(x, weight, bias))


def test_it_is_served(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens as without; every pass keeps its contract, and nothing is found to blame."""
    plain, tiled = folder.parent / "plain.ingot", folder.parent / "tiled.ingot"
    compile_model(folder, plain, **LIMITS)
    compile_model(folder, tiled, passes=PASSES, check_numerics=True, **LIMITS)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = [[one.outputs[0].token_ids for one in LLM(path).generate(PROMPTS, greedy)] for path in (plain, tiled)]
    assert tokens[0] == tokens[1] and all(len(one) == 12 for one in tokens[0])
    artifact = open_artifact(tiled)
    assert artifact.trace["quantize"].numerics is Numerics.EXACT and artifact.trace["quantize"].matches == 7
    print_weights(artifact)
    assert 'format="tiles16"' in capsys.readouterr().out
    assert not bisect(tiled)


def test_a_mesh_splits_it_by_whole_tiles(opened: tuple[Model, Callable[[str], torch.Tensor]]) -> None:
    model, read = opened
    steps = {step.name: step for step in staged(model, edit_pipeline(PASSES, pipeline_for(MESH)), mesh=MESH)[0]}
    params = steps["fuse-qk-norm-rope"].program.params
    assert params["layers.0.attention.q_k_v.qweight"].placement[0].segments == (4, 2, 2)
    assert [params[f"layers.0.{name}.qweight"].type.shape for name in ("mlp.down", "mlp.gate_up")] == [
        (4, 3, 256),
        (6, 4, 256),
    ]
    alone, split = (
        logits_of(steps[name].program, read, [list(range(20)), [7]]) for name in ("quantize", "fuse-qk-norm-rope")
    )
    assert compare(split.exact, alone.exact, torch.float64, factor=100) is None


def test_a_torn_tile_is_refused_by_name(tmp_path: Path) -> None:
    for changes, text in (
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}, ""),  # two heads a tile, four on a rank
        ({"intermediate_size": 80}, "'layers.0.mlp.gate.qweight' has 5 parts of 1, which do not divide among 2 ranks"),
        ({"intermediate_size": 88}, "format 'tiles16' does not fit 3 of 7 linears: 88 rows are no multiple of 16"),
    ):
        model, _ = open_model(MODEL.write(tmp_path / str(changes["intermediate_size"] if text else 0), **changes))
        pipeline, context = edit_pipeline(PASSES, pipeline_for(MESH)), pass_context(bucket=None, mesh=MESH)
        if not text:
            run_pipeline(model, context, (), pipeline, upto=Stage.SHARDED)
            continue
        with pytest.raises(OptionError) as caught:
            run_pipeline(model, context, (), pipeline, upto=Stage.SHARDED)
        assert text in caught.value.what


def test_a_name_means_one_thing() -> None:
    with pytest.raises(InternalError, match="the packing 'tiles16' is defined twice"):
        register_packing(PACKINGS["tiles16"])
    with pytest.raises(InternalError, match="the format 'tiles16' is defined twice"):
        register_format(FORMATS["tiles16"])
    with pytest.raises(InternalError, match="names the packing 'none', which is none of"):
        register_format(Format("other", packing="none"))
