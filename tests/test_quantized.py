"""Quantized weights from a checkpoint to tokens: an artifact of packed integers, served, against plain torch."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_table import without_inductor
from safetensors.torch import load_file, save_file
from serve_artifact import Job, Result, serve
from staged import LIMITS, logits_of, staged
from tiny_checkpoint import Tiny
from transformers import AutoModelForCausalLM

from ingot import LLM, SamplingParams, compile_model
from ingot.cli.views.weights import print_weights
from ingot.compile.packing import Wanted, pack_weights
from ingot.compile.publish import ArtifactWriter
from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir.formats import FORMATS
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.numerics.tolerances import compare
from ingot.ir.program import ParamSpec, Program
from ingot.ir.recipe import concat, quantize, source
from ingot.ir.types import TensorType
from ingot.models.architectures import read_spec
from ingot.passes.pipeline import edit_pipeline
from ingot.runtime.loading.artifact import open_artifact

SCHEME, TOP, GROUP = "int4_g32_asym", 15, 32
PASSES = f"default,quantize{{format={SCHEME}}}"
PROMPTS = [[5, 17, 3, 60, 2, 41], [11], list(range(40))]
NEW_TOKENS = 12
# Sizes that are multiples of the group; two layers, grouped heads, biases.
MODEL = Tiny(
    "llama-quantized",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
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
        "torch_dtype": "float32",
    },
    seed=5,
)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

pytestmark = pytest.mark.xdist_group("quantized")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("quantized") / "checkpoint")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Path:
    output = folder.parent / "model.ingot"
    compile_model(folder, output, backend="reference", passes=PASSES, max_batch=4, max_tokens=64, max_seq_len=96)
    return output


@pytest.fixture(scope="module")
def served(artifact: Path) -> Result:
    return serve(Job(str(artifact), PROMPTS, PROMPTS, NEW_TOKENS, chunked=False))


@pytest.fixture(scope="module")
def program(folder: Path) -> tuple[Program, Callable[[str], torch.Tensor]]:
    """The quantized program, and what reads its checkpoint."""
    found = Checkpoint.open(folder)
    stored = {name: info.dtype for name, info in found.tensors.items()}
    _, lowered = staged(trace(read_spec(found.config), LIMITS, stored), edit_pipeline(PASSES))
    return lowered.fused, found.read


def through_the_format(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight rounded to four bits in groups of 32, and each element's step; written down from the format's text."""
    groups = weight.double().reshape(-1, GROUP)
    low, high = groups.min(1, keepdim=True).values.clamp(max=0), groups.max(1, keepdim=True).values.clamp(min=0)
    step = ((high - low) / TOP).float().double()
    zero = torch.round(-low / step)
    rounded = (torch.clamp(torch.round(groups / step) + zero, 0, TOP) - zero) * step
    return rounded.reshape(weight.shape), step.expand_as(groups).reshape(weight.shape)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Path:
    """The checkpoint with every linear's weight put through the format and back, in plain torch."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.split(".")[-2] in LINEARS and name.endswith("weight"):
            tensors[name] = through_the_format(tensor)[0].float().contiguous()
    other = folder.parent / "rounded"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other


def theirs(checkpoint: Path) -> list[torch.Tensor]:
    """Logits of transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


def test_the_artifact_computes_the_quantized_program(
    served: Result, program: tuple[Program, Callable[[str], torch.Tensor]]
) -> None:
    """Logits within rounding, and the tokens of a greedy search by the interpreter."""
    expected = logits_of(*program, PROMPTS).exact.split([len(prompt) for prompt in PROMPTS])
    for found, wanted in zip(served.logits, expected, strict=True):
        assert compare(found, wanted, torch.float32, factor=10) is None
    # Teacher-forced on what was served: each token is the interpreter's choice after those before it.
    whole = [prompt + tokens for prompt, tokens in zip(PROMPTS, served.tokens, strict=True)]
    rows = logits_of(*program, whole).found.split([len(tokens) for tokens in whole])
    for prompt, tokens, logits in zip(PROMPTS, served.tokens, rows, strict=True):
        assert len(tokens) == NEW_TOKENS
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_the_artifact_is_transformers_with_rounded_weights(served: Result, rounded: Path) -> None:
    for found, wanted in zip(served.logits, theirs(rounded), strict=True):
        assert compare(found, wanted, torch.float32, factor=10) is None


def test_the_loss_is_bounded_by_the_step(served: Result, folder: Path, rounded: Path, artifact: Path) -> None:
    """Each stored weight lies within a step of the checkpoint's, and the logits stay near those of the float model."""
    true, near = load_file(folder / "model.safetensors"), load_file(rounded / "model.safetensors")
    for name, tensor in true.items():
        if torch.equal(tensor, near[name]):
            assert name.split(".")[-2] not in LINEARS or name.endswith("bias")
        else:
            assert bool(((tensor - near[name]).abs() <= 1.001 * through_the_format(tensor)[1]).all())
    # A product of K terms, each off by an error of up to half a step and of no fixed sign, is off by about
    # sqrt(K / 12) steps times the size of an activation. The first layer's q from the artifact's own numbers:
    weights = stored_weights(artifact)
    q = true["model.layers.0.self_attn.q_proj.weight"]
    parts = [weights[f"layers.0.attention.q_k_v.{part}"][: len(q)] for part in ("qweight", "scales", "zeros")]
    elements = torch.stack((parts[0] & 15, parts[0] >> 4), -1).reshape(len(q), -1, GROUP).double()
    found = ((elements - parts[2][..., None].double()) * parts[1][..., None].double()).reshape(q.shape)
    step = through_the_format(q)[1]
    assert bool(((found - q).abs() <= 1.001 * step).all())
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = (x @ (found - q.double()).T).std()
    assert 0.8 < float(error / (math.sqrt(64 / 12) * step.mean())) < 1.2
    for ours, exact in zip(served.logits, theirs(folder), strict=True):
        lost = (ours.double() - exact).std() / exact.std()
        assert 0.01 < float(lost) < 0.5, "four bits show, and do not drown the model"


def stored_weights(artifact: Path) -> Mapping[str, torch.Tensor]:
    return {name: tensor for file in (artifact / "weights").iterdir() for name, tensor in load_file(file).items()}


def test_three_params_from_one_recipe(artifact: Path) -> None:
    index = json.loads((artifact / "weights.json").read_text())
    for place in ("attention.q_k_v", "attention.o", "mlp.gate_up", "mlp.down"):
        entries = {part: index[f"layers.1.{place}.{part}"] for part in ("qweight", "scales", "zeros")}
        assert [entry["dtype"] for entry in entries.values()] == ["u8", "f32", "u8"]
        rows, packed = entries["qweight"]["shape"]
        assert entries["scales"]["shape"] == entries["zeros"]["shape"] == [rows, packed * 2 // GROUP]
        steps = {entry["recipe"].replace(f").{part.replace('qw', 'w')}", ")") for part, entry in entries.items()}
        assert len(steps) == 1 and f'format="{SCHEME}"' in steps.pop()
    assert index["embed.weight"]["dtype"] == index["head.weight"]["dtype"] == "f32"
    float_bytes = sum(
        tensor.numel() * 4
        for name, tensor in load_file(artifact.parent / "checkpoint" / "model.safetensors").items()
        if name.split(".")[-2] in LINEARS and name.endswith("weight")
    )
    stored = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in stored_weights(artifact).items()
        if name.rpartition(".")[2] in ("qweight", "scales", "zeros")
    )
    # Half a byte an element, and five bytes a group.
    assert stored == float_bytes // 4 * (0.5 + 5 / GROUP)


def test_inspect_shows_a_shared_recipe_once(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_weights(open_artifact(artifact))
    lines = " ".join(capsys.readouterr().out.split())
    assert lines.count('quantize(source(name="model.layers.0.self_attn.o_proj.weight"), format="int4_g32_asym")') == 1
    assert "scales of the recipe of layers.0.attention.o.qweight" in lines
    assert "zeros of the recipe of layers.1.mlp.gate_up.qweight" in lines


def test_a_shared_step_is_executed_once(tmp_path: Path) -> None:
    """Packing reads a weight once for its three parts, also when the merged parts of two lie between others."""
    format, reads = FORMATS["int4_g32_asym"], []
    params: dict[str, ParamSpec] = {}
    types = format.types((8, 64), torch.float32)
    for part in format.parts:
        recipes = [quantize(source(name), format.name)[part] for name in ("a", "b")]
        shape = types[part]
        params[f"ab.{part}"] = ParamSpec(TensorType(shape.dtype, (16, *shape.shape[1:])), concat(recipes))
        params[f"norm.{part}"] = ParamSpec(TensorType(torch.float32, (4,)), source(f"norm.{part}"))

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return torch.randn(4) if name.startswith("norm") else torch.randn(8, 64)

    with ArtifactWriter(tmp_path / "x.ingot") as writer:
        packed = pack_weights({"": Wanted(params, writer)}, read, writer)
    assert sorted(reads) == ["a", "b", "norm.scales", "norm.weight", "norm.zeros"]
    assert packed.tensors == 6 and packed.bytes == 16 * 32 + 16 * 2 * 5 + 3 * 16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("passes", ["quantize{format=int8,lm_head=true}", PASSES.partition(",")[2]])
def test_kernels_of_a_cpu_generate_the_tokens_of_the_reference(
    passes: str, dtype: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits are as near to float64 as the reference's, and their tokens the best of float64.

    Where float64 has two logits closer than the reference's own error can decide, either of them may be chosen.
    """
    without_inductor(monkeypatch)
    limits: Any = {"max_batch": 4, "max_tokens": 64, "max_seq_len": 96, "target": "cpu", "dtype": dtype}
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    tokens, llms = {}, {}
    for backend in ("reference", "auto"):
        compile_model(folder, tmp_path / f"{backend}.ingot", backend=backend, passes=f"default,{passes}", **limits)
        llms[backend] = LLM(tmp_path / f"{backend}.ingot", num_kv_pages=64)
        tokens[backend] = [one.outputs[0].token_ids for one in llms[backend].generate(prompts, greedy)]
    if dtype == "float32":
        assert tokens["auto"] == tokens["reference"]

    whole = [prompt + made for prompt, made in zip(PROMPTS, tokens["auto"], strict=True)]
    exact = InterpreterRun(*quantized(folder, passes, dtype), exact=True)
    expected = teacher_forced(exact.program.input_types(), exact, whole, chunk=11)
    errors = {}
    for backend, llm in llms.items():
        executor = llm.loaded.executor
        for state in executor.states.values():
            state.fill_(math.nan if state.is_floating_point() else 0)
        found = teacher_forced(executor.inputs, partial(_outputs, executor), whole, chunk=11)
        errors[backend] = float((torch.cat(found) - torch.cat(expected)).double().square().mean().sqrt())
    # The mean over some 10,000 logits. 1.2 is an estimate of what another order of roundings changes.
    assert errors["auto"] < 1.2 * errors["reference"]
    # The error of a difference of two logits is sqrt(2) times that of one. Four times it is met once in 16,000 rows.
    bound = 4 * math.sqrt(2) * errors["reference"]
    for prompt, made, logits in zip(PROMPTS, tokens["auto"], expected, strict=True):
        for token, row in zip(made, logits[len(prompt) - 1 :], strict=False):
            assert float(row.max() - row[token]) <= bound


def _outputs(executor: Any, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    outputs: Mapping[str, torch.Tensor] = executor.launch(inputs).outputs
    return outputs


def quantized(folder: Path, passes: str, dtype: str) -> tuple[Program, Mapping[str, torch.Tensor]]:
    """The program whose linears are quantized, with its params."""
    request = Request.read(folder, passes=f"default,{passes}", dtype=dtype, max_seq_len=96, max_batch=4, max_tokens=64)
    limits = Limits(max_seq_len=96, max_batch=4, max_tokens=64)
    _, lowered = staged(request.trace(), edit_pipeline(f"default,{passes}"), limits)
    return lowered.fused, load_params(lowered.fused.params, Checkpoint.open(folder).read)
