"""An encoder without a cache: each token sees its whole sequence, and a pooling ending makes a vector of each prompt.

Vectors are compared with those that plain torch makes of the checkpoint's tensors in float64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from changed_definition import change_definition
from command_text import command_text
from safetensors.torch import load_file
from specs import changed
from tiny import TINY
from torch import nn

from ingot import LLM, IngotError, PoolingParams, compile_model
from ingot.ir.features import EndingUse
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry
from ingot.models.blocks.attention import Attention, AttentionSpec
from ingot.models.blocks.decoder import Decoder, DecoderSpec
from ingot.models.params import Place

pytestmark = pytest.mark.xdist_group("encoder")
NAME = "llama-plain"
LENGTHS = (1, 13, 3, 16, 9, 2, 33, 48, 96, 5)
PROMPTS = [[(7 * i * length + length) % 211 for i in range(length)] for length in LENGTHS]


class AheadAttention(Attention):
    def options(self) -> dict[str, Any]:
        return {**super().options(), "mask": "bidirectional"}


class AheadSpec(AttentionSpec):
    def build(self, place: Place, hidden: int, layer: int) -> AheadAttention:
        return AheadAttention(self, place / self.names.place, hidden, layer)


def build(spec: DecoderSpec, dtype: torch.dtype, max_seq_len: int) -> Decoder:
    """A decoder in which attention looks ahead."""
    return Decoder(changed(spec, AttentionSpec, lambda one: AheadSpec(**vars(one))), dtype, max_seq_len)


class Encoder(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Any, positions: Any, token_seqs: Any) -> torch.Tensor:
        at = self.decoder.at(positions, token_seqs)
        h = self.decoder.embed(tokens, at)
        for layer in self.decoder.layers:
            h = layer(h, at)
        return self.decoder.norm(h)


def expected(folder: Path, prompt: list[int], pooling: str) -> torch.Tensor:
    """The pooled vector in float64."""
    weights = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
    config = TINY[NAME].config
    heads, dim, eps = config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"]
    count = len(prompt)
    angles = torch.outer(
        torch.arange(count).double(),
        config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim),
    )
    cos, sin = torch.cat([angles, angles], -1).cos()[:, None], torch.cat([angles, angles], -1).sin()[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weights[name]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin

    h = weights["model.embed_tokens.weight"][prompt]
    for index in range(config["num_hidden_layers"]):
        own = f"model.layers.{index}."
        x = norm(h, own + "input_layernorm.weight")
        q, k, v = (F.linear(x, weights[f"{own}self_attn.{one}_proj.weight"]).view(count, heads, dim) for one in "qkv")
        q, k, v = (one.transpose(0, 1) for one in (turned(q), turned(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        h = h + F.linear(mixed.transpose(0, 1).reshape(count, -1), weights[own + "self_attn.o_proj.weight"])
        x = norm(h, own + "post_attention_layernorm.weight")
        gate, up, down = (weights[f"{own}mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
        h = h + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    h = norm(h, "model.norm.weight")
    return h.mean(0) if pooling == "mean" else h[0] if pooling == "cls" else h[-1]


# Target, backend, pooling, tokens of a step. Up to 16 tokens a CPU's kernels compute all, and no region is compiled.
CPU = [("cpu", "reference", "cls", 48), ("cpu", "auto", "mean", 16)]
GPU = [("cuda", "auto", "mean", 96), ("cuda", "triton", "last", 48)]


@pytest.fixture(params=[*CPU, *(pytest.param(one, marks=pytest.mark.gpu) for one in GPU)], ids=str)
def made(request: Any, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: Any) -> tuple[Path, str, int]:
    target, backend, pooling, most = request.param
    inputs = {name: TensorType(torch.int32, ("T",)) for name in ("tokens", "positions", "token_seqs")}
    ending = EndingUse("pool", (("pooling", pooling),))

    def entries(spec: Any, decoder: Decoder) -> dict[str, Entry]:
        return {"main": Entry(Encoder(decoder), inputs, ("hidden",), ending)}

    without_head = lambda spec: (*DecoderSpec.ignored(spec), r"lm_head\.weight")  # noqa: E731
    change_definition(monkeypatch, "LlamaForCausalLM", build=build, more_entries=entries, ignored=without_head)
    limits = {"max_batch": 4, "max_tokens": most, "max_seq_len": most + 8}
    options: dict[str, Any] = {"target": target, "backend": backend, "dtype": "float32", **limits}
    compile_model(checkpoint(NAME), tmp_path / "encoder.ingot", **options)
    return tmp_path / "encoder.ingot", pooling, most


def test_an_encoder_embeds(
    made: tuple[Path, str, int], checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pooling, most = made
    for command in (("inspect", folder), ("explain", folder), ("inspect", folder, "--plan")):
        text = command_text(capsys, *command)
        assert "\ncache groups  none: the model has no paged KV cache\n" in text
        assert "\nmain: all tokens of a sequence see each other: a step holds whole sequences\n" in text
    assert "\nKV cache     none\n" in text
    llm = LLM(folder, cuda_graphs="all")
    assert llm.loaded.plan.memory.groups == {} and "temperature" not in llm.loaded.plan.inputs
    fitting = [prompt for prompt in PROMPTS if len(prompt) <= most]
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in fitting]
    # Steps of more than 64 tokens have graphs.
    assert bool(llm.loaded.executor.captured.prompts) == (llm.loaded.context.device.type == "cuda" and most > 64)
    outputs = llm.embed(prompts)  # several in a step, in several steps
    wanted = [expected(checkpoint(NAME), prompt, pooling) for prompt in fitting]
    for out, vector, prompt in zip(outputs, wanted, fitting, strict=True):
        assert out.finish_reason == "stop" and out.num_prompt_tokens == len(prompt)
        assert torch.allclose(torch.tensor(out.embedding, dtype=torch.float64), vector, rtol=1e-3, atol=1e-4)
    cut = llm.embed(prompts[3], PoolingParams(dimensions=7, normalize=True))[0].embedding
    assert torch.allclose(torch.tensor(cut, dtype=torch.float64), F.normalize(wanted[3][:7], dim=0), atol=1e-4)
    with pytest.raises(IngotError, match=f"sees all of them in one step(.|\\n)*at most {most}"):
        llm.embed([{"prompt_token_ids": [1] * (most + 1)}])
    with pytest.raises(IngotError, match="prompt is empty"):
        llm.embed([{"prompt_token_ids": []}])
    with pytest.raises(IngotError, match="vectors and no tokens"):
        llm.generate(prompts)
