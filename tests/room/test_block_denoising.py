"""Denoising block by block: a decoder whose tokens see their whole block of 8 commits 0 or all of 8 in each step.

Tokens are compared with those of a loop in float64 that computes whole sequences again and again.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_definition import change_definition
from command_text import command_text
from recorded_steps import RecordedSteps
from safetensors.torch import load_file, save_file
from specs import changed
from tiny import TINY
from torch import nn

from ingot import LLM, SamplingParams, bisect, compile_model
from ingot.ir.errors import IngotError, OptionError, RequestError
from ingot.ir.features.feature import EndingUse
from ingot.models.architectures import Entry
from ingot.models.blocks.attention import Attention, AttentionSpec
from ingot.models.blocks.decoder import Decoder, DecoderSpec
from ingot.models.params import Place

pytestmark = pytest.mark.xdist_group("block-denoising")
NAME, BLOCK, MASK_TOKEN, STEPS, SURE = "llama-plain", 8, 5, 5, 60
CONFIG, WEIGHTS = TINY[NAME].config, "model.safetensors"
PROMPTS = [prompt for prompt in TINY[NAME].prompts() if len(prompt) in (1, 2, 16, 17, 33)]
NEW_TOKENS = (20, 8, 16, 31, 21)
PARAMS = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in NEW_TOKENS]


class BlockAttention(Attention):
    def options(self) -> dict[str, Any]:
        return {**super().options(), "mask": f"block_causal_{BLOCK}"}


class BlockAttentionSpec(AttentionSpec):
    def build(self, place: Place, hidden: int, layer: int) -> BlockAttention:
        return BlockAttention(self, place / self.names.place, hidden, layer)


def build(spec: DecoderSpec, dtype: torch.dtype, max_seq_len: int) -> Decoder:
    by_block = changed(spec, AttentionSpec, lambda one: BlockAttentionSpec(**vars(one)))
    return Decoder(by_block, dtype, max_seq_len)


def entries(spec: Any, module: nn.Module) -> dict[str, Entry]:
    attributes = {"block": BLOCK, "mask_token": MASK_TOKEN, "steps": STEPS, "sure_percent": SURE}
    return {"main": Entry(module, ending=EndingUse("block", tuple(attributes.items())))}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folder(request: Any, checkpoint: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[Path]:
    backend = "reference" if request.param == "cpu" else "auto"
    options: Any = {"max_batch": 5, "max_tokens": 64, "max_seq_len": 96, "target": request.param, "backend": backend}
    output = tmp_path_factory.mktemp("blocks")
    source = Path(shutil.copytree(checkpoint(NAME), output / "checkpoint"))
    tensors = load_file(source / WEIGHTS)  # with a larger head it is sure of some positions
    save_file({**tensors, "lm_head.weight": 3 * tensors["lm_head.weight"]}, source / WEIGHTS)
    with pytest.MonkeyPatch.context() as patch:
        change_definition(patch, "LlamaForCausalLM", build=build, more_entries=entries)
        with pytest.raises(IngotError, match="max_seq_len = 100, but the ending 'block' takes 8 tokens at once"):
            compile_model(source, output / "a.ingot", **{**options, "max_seq_len": 100})
        with pytest.raises(
            OptionError, match=r"with the mask block_causal_8 .* results depend on prompt chunks"
        ) as found:
            compile_model(source, output / "a.ingot", **options, deterministic=True)
        assert "%attention" in found.value.where
        assert found.value.expected and found.value.hint == "compile without deterministic"
        compile_model(source, output / "a.ingot", check_numerics=True, **options)
        yield output


def logits(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """f64[n, vocab] of a sequence of whole blocks."""
    place = torch.arange(len(tokens))
    seen = place[None, :] // BLOCK <= place[:, None] // BLOCK
    width, eps = CONFIG["head_dim"], CONFIG["rms_norm_eps"]
    angles = place[:, None].double() * 503.0 ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], weights[name], eps)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin

    h = weights["model.embed_tokens.weight"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        own = {name.removeprefix(f"model.layers.{layer}."): one for name, one in weights.items()}
        x = norm(h, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = ((x @ own[f"self_attn.{one}_proj.weight"].T).view(len(tokens), -1, width) for one in "qkv")
        heads = (one.transpose(0, 1) for one in (turned(q), turned(k), v))
        mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(0, 1).flatten(1)
        h = h + mixed @ own["self_attn.o_proj.weight"].T
        x = norm(h, f"model.layers.{layer}.post_attention_layernorm.weight")
        gated = nn.functional.silu(x @ own["mlp.gate_proj.weight"].T) * (x @ own["mlp.up_proj.weight"].T)
        h = h + gated @ own["mlp.down_proj.weight"].T
    return norm(h, "model.norm.weight") @ weights["lm_head.weight"].T


def denoised(weights: dict[str, torch.Tensor], prompt: list[int], count: int) -> tuple[list[int], int]:
    """At least `count` tokens after a prompt, and the steps that they took."""
    tokens, steps = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        start, steps = len(tokens) // BLOCK * BLOCK, steps + 1  # the one that commits the block
        block: list[int | None] = [*tokens[start:], *[None] * (start + BLOCK - len(tokens))]
        while None in block:
            fed = [MASK_TOKEN if token is None else token for token in block]
            chance, choice = logits(weights, tokens[:start] + fed)[start:].softmax(-1).max(-1)
            surest = sorted((i for i in range(BLOCK) if block[i] is None), key=lambda i: -float(chance[i]))
            for i in [*surest[: -(-BLOCK // STEPS)], *(i for i in surest if chance[i] * 100 > SURE)]:
                block[i] = int(choice[i])
            steps += 1
        tokens[start:] = [int(token or 0) for token in block]
    return tokens[len(prompt) :], steps


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[list[int], int]]:
    weights = {name: one.double() for name, one in load_file(folder / "checkpoint" / WEIGHTS).items()}
    return [denoised(weights, *one) for one in zip(PROMPTS, NEW_TOKENS, strict=True)]


def served(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, params)]


def test_tokens_are_those_of_whole_sequences(folder: Path, wanted: list[tuple[list[int], int]]) -> None:
    tokens = [found[:count] for (found, _), count in zip(wanted, NEW_TOKENS, strict=True)]
    llm = LLM(folder / "a.ingot", num_kv_pages=40, cuda_graphs="all")
    llm.llm_engine.launch_through(steps := RecordedSteps(llm, keep=("rejected",)))
    assert served(llm, PROMPTS, PARAMS) == tokens
    assert {count for outputs in steps.outputs for count in outputs["rejected"].tolist()} == {0, BLOCK}
    assert served(llm, PROMPTS, PARAMS) == tokens and llm.prefix_cache_stats.hits == 16 + 16 + 32
    # What was generated is found as well; a block that is denoised is not.
    longer = [prompt + found for prompt, found in zip(PROMPTS, tokens, strict=True)]
    fresh = LLM(folder / "a.ingot", num_kv_pages=40, enable_prefix_caching=False)
    assert served(llm, longer, PARAMS) == served(fresh, longer, PARAMS)
    tight = LLM(folder / "a.ingot", num_kv_pages=4, max_num_batched_tokens=24, max_num_seqs=3)
    assert served(tight, PROMPTS, PARAMS) == tokens and tight.llm_engine.occupancy.preemptions


def test_blocks_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = command_text(capsys, "inspect", folder / "a.ingot")
    assert "\nfull         every token " in text
    together = "8 tokens of a block see each other: a step holds whole blocks, or up to the end of the sequence"
    assert f"\nmain: {together}\n" in text


def test_bisect_refuses_blocks(folder: Path) -> None:
    with pytest.raises(OptionError, match=f"the ending 'block', which feeds up to {BLOCK} tokens") as caught:
        bisect(folder / "a.ingot", checkpoint=folder / "checkpoint")
    assert caught.value.expected and "check_numerics" in caught.value.hint


def test_steps_and_stops(folder: Path, wanted: list[tuple[list[int], int]]) -> None:
    llm = LLM(folder / "a.ingot", num_kv_pages=40)
    for prompt, (tokens, count), one in zip(PROMPTS, wanted, PARAMS, strict=True):
        llm.llm_engine.launch_through(steps := RecordedSteps(llm))
        assert served(llm, [prompt], [one]) == [tokens[: one.max_tokens]] and len(steps.tokens) == count
        stops = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[tokens[3]])
        assert served(llm, [prompt], [stops]) == [tokens[: tokens.index(tokens[3]) + 1]]
    with pytest.raises(RequestError, match="ending does not serve"):
        served(llm, PROMPTS[:1], [SamplingParams(temperature=0.7)])
