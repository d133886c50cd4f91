"""A latent cache and a cache of two widths in one model: what attention reads is not keys beside values of their width.

All heads of q in the first layer read one row per token, whose first numbers are also its value: multi-head latent
attention in its absorbed form. Keys of the second layer are narrower than values. The oracle is torch in float64 on
whole sequences.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_text import command_text
from harmed_pass import Fault, calls, check_named, planted
from safetensors.torch import load_file, save_file
from tiny import TINY
from torch import fx

from ingot import LLM, SamplingParams, bisect, compile_model
from ingot.backends.reference import load as reference_load
from ingot.debug.bisect.programs import chain
from ingot.debug.bisect.verdict import Kind
from ingot.ir import build as built
from ingot.ir import ops, recipe
from ingot.ir.artifact.record import Rewrite
from ingot.ir.program import Program
from ingot.ir.tables import make_table
from ingot.models.architectures import ARCHITECTURES, Architecture, Definition
from ingot.models.blocks.block import Block
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.families.llama import llama
from ingot.models.params import parameter
from ingot.passes.insert_paged_kv import InsertPagedKV

pytestmark = pytest.mark.xdist_group("latent-cache")
CONFIG = {**TINY["llama-plain"].config, "architectures": ["ToyLatentForCausalLM"], "num_hidden_layers": 2}
HIDDEN, VOCAB, ROTARY = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["head_dim"]
LAYERS: list[dict[str, Any]] = [
    {"q": 6, "k": 1, "key": 40, "value": 32, "shared": True},
    {"q": 4, "k": 2, "key": 24, "value": 41, "shared": False},
]
PROMPTS = [prompt for prompt in TINY["llama-plain"].prompts() if len(prompt) in (1, 17, 33, 64)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed": (VOCAB, HIDDEN), "head": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for index, one in enumerate(LAYERS):
        found[f"norm{index}"], found[f"q{index}"] = (HIDDEN,), (one["q"] * one["key"], HIDDEN)
        found[f"k{index}"] = (one["k"] * one["key"], HIDDEN)
        if not one["shared"]:
            found[f"v{index}"] = (one["k"] * one["value"], HIDDEN)
        found[f"o{index}"] = (HIDDEN, one["q"] * one["value"])
    return found


class Decoder(Block):
    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, max_seq_len: int) -> None:
        super().__init__()
        self.eps = spec.norm.eps
        table = recipe.table(kind="rope", rope_type="default", positions=max_seq_len, theta=1e4, rotary_dim=ROTARY)
        self.table = parameter((max_seq_len, ROTARY), table, torch.float32)
        for name, shape in shapes().items():
            self.register_parameter(name, parameter(shape, recipe.source(name), dtype))

    def matches(self) -> dict[str, int]:
        return {"insert-paged-kv": 2, "merge-linears": 2}

    def forward(self, tokens: Any, positions: Any, token_seqs: Any, logit_rows: Any) -> torch.Tensor:
        weights = {name: getattr(self, name) for name in shapes()}
        h = ops.embedding(tokens, weights["embed"])
        for layer, one in enumerate(LAYERS):
            x = ops.rms_norm(h, weights[f"norm{layer}"], eps=self.eps)
            wide = {name: ops.linear(x, weights[f"{name}{layer}"]) for name in "qk"}
            q, k = (ops.rope(wide[n].view(-1, one[n], one["key"]), positions, self.table) for n in "qk")
            options, v = {"scale": one["key"] ** -0.5, "layer": layer}, None
            if one["shared"]:
                options["value_width"] = one["value"]
            else:
                v = ops.linear(x, weights[f"v{layer}"]).view(-1, one["k"], one["value"])
            mixed = ops.attention(q, k, v, positions, token_seqs, **options)
            h = h + ops.linear(mixed.view(-1, one["q"] * one["value"]), weights[f"o{layer}"])
        x = ops.rms_norm(ops.select_rows(h, logit_rows), weights["norm"], eps=self.eps)
        return ops.cast(ops.linear(x, weights["head"]), dtype=torch.float32)


DEFINITION = Definition(build=Decoder, ignored=lambda spec: ())


def oracle(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of every position, in float64."""
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    angles = {"kind": "rope", "rope_type": "default", "positions": len(tokens), "theta": 1e4, "rotary_dim": ROTARY}
    cos, sin = make_table(angles).double()[:, None].chunk(2, -1)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[name], CONFIG["rms_norm_eps"])

    h = weights["embed"][list(tokens)]
    for layer, one in enumerate(LAYERS):
        x = normed(h, f"norm{layer}")
        turned = {}
        for name in "qk":
            heads = (x @ weights[f"{name}{layer}"].T).view(-1, one[name], one["key"])
            a, b, rest = heads.split([ROTARY // 2, ROTARY // 2, one["key"] - ROTARY], -1)
            heads = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
            turned[name] = heads.repeat_interleave(one["q"] // one[name], 1)
        v = turned["k"][..., : one["value"]]
        if not one["shared"]:
            v = (x @ weights[f"v{layer}"].T).view(-1, one["k"], one["value"])
            v = v.repeat_interleave(one["q"] // one["k"], 1)
        scores = torch.einsum("nhd,mhd->hnm", turned["q"], turned["k"]) * one["key"] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        mixed = torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        h = h + mixed.flatten(1) @ weights[f"o{layer}"].T
    return normed(h, "norm") @ weights["head"].T


@pytest.fixture(
    params=["cpu", pytest.param("auto", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def source(request: Any, tmp_path: Path, monkeypatch: Any) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and what it is compiled with."""
    g = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=g) * (1.5 / shape[-1] ** 0.5) for name, shape in shapes().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setitem(ARCHITECTURES, CONFIG["architectures"][0], Architecture("toy", llama, DEFINITION))
    backend = {"cpu": "reference", "auto": "auto", "cuda": "triton"}[request.param]
    options = {"target": request.param.replace("auto", "cpu"), "backend": backend, "dtype": "float32"}
    return tmp_path, {**options, "max_batch": 4, "max_tokens": 128, "max_seq_len": 96}


def test_it_is_served(source: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, options = source
    artifact = folder / "toy.ingot"
    compile_model(folder, artifact, **options)
    forms = "1 head, keys of 40 numbers, of which 32 are values, f32; 2 heads, keys of 24 numbers and values of 41, f32"
    assert f"  0–1     {forms}\n" in command_text(capsys, "inspect", artifact)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm = LLM(artifact, num_kv_pages=40, cuda_graphs="all", enable_prefix_caching=True)
    caches = {name: state.type for name, state in llm.loaded.plan.states.items() if state.kind == "paged_kv"}
    assert caches == {"kv.0": "f32[pages, 1, 16, 1, 40]", "kv.1": "f32[pages, 1, 16, 2, 65]"}
    served = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, PARAMS)]
    for prompt, tokens in zip(PROMPTS, served, strict=True):
        assert tokens == oracle(folder, prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
    again = llm.generate(prompts, PARAMS)
    assert [list(out.outputs[0].token_ids) for out in again] == served
    assert [out.num_cached_tokens for out in again] == [0, 16, 32, 48]
    pieces = LLM(artifact, num_kv_pages=8, max_num_batched_tokens=20)  # prompts in chunks, and preempted
    assert [list(out.outputs[0].token_ids) for out in pieces.generate(prompts, PARAMS)] == served
    assert pieces._engine._scheduler.num_preemptions
    assert options["target"] != "cpu" or not bisect(artifact)


SKIPPED = LAYERS[0]["key"] - LAYERS[0]["value"]  # numbers of a key that are not of its value


def _last_numbers(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    """The last numbers of a key stand for its value, in place of the first."""
    (node,) = calls(nodes, ops.paged_attention.overload)
    options = {**node.kwargs, "value_width": LAYERS[0]["key"]}
    with program.graph.inserting_before(node):
        whole = built.call(program, node.target, node.args, options)
        ends = (whole, 2, SKIPPED, LAYERS[0]["key"])
        last = built.call(program, torch.ops.aten.slice.Tensor, ends)
        dense = built.call(program, torch.ops.aten.mul.Tensor, (last, 1.0))
    node.replace_all_uses_with(dense)
    program.graph.erase_node(node)


@pytest.mark.slow
def test_values_of_other_numbers_are_named(
    source: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a backend, and by a pass."""
    folder, options = source
    if options["backend"] != "reference":
        pytest.skip("the faults are planted in the reference backend")
    compile_model(folder, folder / "toy.ingot", **options)
    attend = ops.paged_attention.reference

    def other(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "value_width" not in kwargs:
            return attend(*args, **kwargs)
        return attend(*args, **{**kwargs, "value_width": LAYERS[0]["key"]})[..., SKIPPED:].contiguous()

    faulty = replace(ops.paged_attention, reference=other)
    with monkeypatch.context() as patch:
        patch.setattr(reference_load, "OPS", {**ops.OPS, "paged_attention": faulty})
        verdict = bisect(folder / "toy.ingot")
    assert (verdict.kind, verdict.blamed, verdict.node) == (Kind.BACKEND, "reference", "paged_attention"), verdict
    fault = Fault(InsertPagedKV, 0, _last_numbers, "paged_attention_1")  # the call that the harm puts in
    monkeypatch.setattr(chain, "texts_of", lambda artifact: {})  # the programs are made again
    with planted(fault.whose, fault.index, fault.harm):
        check_named(bisect(folder / "toy.ingot"), fault)
