"""How often each pass matches, per family and flags: a formula, the committed goldens and the pipeline agree."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from drawn import drawn
from specs import specs
from staged import BACKENDS, LIMITS, pass_context, staged, traced
from tiny import TINY

from ingot.backends.cpu.emit import Cpu
from ingot.backends.cublas.emit import Cublas
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.ir.machine.target import Target
from ingot.ir.program import Stage
from ingot.models.architectures import ARCHITECTURES, read_spec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.indexer import IndexerSpec
from ingot.models.blocks.latent_attention import LatentAttentionSpec
from ingot.models.blocks.normed_latent_attention import NormedLatentAttentionSpec
from ingot.models.blocks.shared_attention import SharedAttentionSpec
from ingot.passes.manager import run_pipeline

_FOLDER = Path(__file__).parents[1] / "goldens"
ON_A_CPU = _FOLDER / "matches.json"
# On sm_90, in bfloat16, with the classes of one token and of many.
ON_A_GPU = _FOLDER / "matches_on_a_gpu.json"
GPU_BACKENDS = (Triton(), Cublas(), Reference(), Rowwise())

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 160,
}
FAMILIES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "plain": {},
            "tied": {"tie_word_embeddings": True},
            "attention bias": {"attention_bias": True},
            "mlp bias": {"mlp_bias": True},
            "all biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "bfloat16": {"torch_dtype": "bfloat16"},
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {
            "plain": {},
            "tied": {"tie_word_embeddings": True},
            "attention bias": {"attention_bias": True},
            "bfloat16": {"torch_dtype": "bfloat16"},
        },
    ),
}
FLAGS = {
    f"{family}, {flags}, {layers} layers": {
        **_COMMON,
        "architectures": [architecture],
        "num_hidden_layers": layers,
        **changes,
    }
    for family, (architecture, variants) in FAMILIES.items()
    for flags, changes in variants.items()
    for layers in (1, 4)
}


# Every other family by its tiny checkpoints, which have its quirks.
CASES = {**FLAGS, **{name: dict(tiny.config) for name, tiny in TINY.items()}}


def goldens(file: Path) -> dict[str, dict[str, int]]:
    """Return how often each pass matches, by case and pass."""
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]  # a file of this folder


def check_matches(file: Path, case: str, found: dict[str, int]) -> None:
    """Compare with the golden of a case. UPDATE_GOLDENS=1 writes it, in one process, for review before a commit."""
    known = goldens(file)
    if os.environ.get("UPDATE_GOLDENS"):
        known = {name: counts for name, counts in {**known, case: found}.items() if name in CASES}
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(counts)}" for name, counts in known.items())
        file.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    assert found == known.get(case), "fewer matches are lost speed; UPDATE_GOLDENS=1 writes a new or a better golden"


def test_every_family_has_goldens() -> None:
    for file in (ON_A_CPU, ON_A_GPU):
        again = "UPDATE_GOLDENS=1 python -m pytest --run-slow -k match_as_often tests/passes/test_matches.py"
        assert goldens(file).keys() == CASES.keys(), f"`{again}` writes {file.name}"
    families = {ARCHITECTURES[config["architectures"][0]].family for config in CASES.values()}
    assert families == {architecture.family for architecture in ARCHITECTURES.values()}


@pytest.mark.parametrize("case", CASES)
def test_the_formula_gives_the_goldens(case: str) -> None:
    config = CASES[case]
    expected = traced(config).expected["main"]
    golden = goldens(ON_A_CPU).get(case, {})
    assert expected == {name: golden.get(name) for name in expected}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", drawn(10, CASES))
def test_the_passes_match_as_often(case: str) -> None:
    steps, _ = staged(traced(CASES[case]))
    found: dict[str, int] = {}
    for step in steps[1:]:
        assert step.record is not None
        found[step.name] = found.get(step.name, 0) + step.record.matches  # a pass may run on the way to several stages
    check_matches(ON_A_CPU, case, found)
    # Nothing in these families stands in the way of a rewrite; only backends say No, and have no kernel for one op.
    refusing = {step.name for step in steps if step.record and step.record.refusals}
    always = {"choose-backends", "fuse-qk-norm-rope", "fuse-append-attention", "select-rows-early"}
    assert always <= refusing <= {*always, "fuse-add-rms-norm", "merge-linears"}
    # Latents and indexers stay whole on a mesh, while q is split.
    records = [step.record for step in steps if step.record and step.name == "merge-linears"]
    reasons = [refusal.reason for record in records for refusal in record.refusals]
    assert all(
        re.fullmatch(r"the weights have no common placement .*(kv_down|indexer\.q)\.weight whole.*", reason)
        for reason in reasons
    )
    # A norm that no sum stands in front of: of the embedding, or of what a product gives.
    records = [step.record for step in steps if step.record and step.name == "fuse-add-rms-norm"]
    reasons = [refusal.reason for record in records for refusal in record.refusals]
    assert all(re.fullmatch(r"the norm reads (the|a) result of [\w.]+, not a sum", reason) for reason in reasons)
    # The stream, and what the last attention is made of; of several streams also what is read beside attention, and the
    # embeddings for all layers.
    most = 5 if "altup_num_inputs" in json.dumps(CASES[case]) else 2
    (record,) = (step.record for step in steps if step.record and step.name == "select-rows-early")
    reasons = [refusal.reason for refusal in record.refusals]
    assert all(re.fullmatch(r"%\w+ is read whole too, by %\w+", reason) for reason in reasons)
    assert len(reasons) <= most


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", drawn(10, CASES))
def test_the_passes_match_as_often_on_a_gpu(case: str) -> None:
    target = Target.named("sm_90")
    of_one, *_, of_many = bucket_classes(target, GPU_BACKENDS, LIMITS.max_tokens, LIMITS.max_batch, deterministic=False)
    context = pass_context(target=target, backends=GPU_BACKENDS, bucket=None)
    model = traced({**CASES[case], "dtype": "bfloat16"})
    found: dict[str, int] = {}
    for record in run_pipeline(model, context, (of_one, of_many), upto=Stage.LOWERED).records:
        if record.name != "emit-executables":  # kernels, and not calls
            found[record.name] = found.get(record.name, 0) + record.matches
    check_matches(ON_A_GPU, case, found)


def test_each_pass_matches_somewhere() -> None:
    """But those for which definitions leave nothing to do, or that go by times of calls or need quantized weights."""
    counts = [golden for file in (ON_A_CPU, ON_A_GPU) for golden in goldens(file).values()]
    passes = {name for golden in counts for name in golden}
    matched = {name for golden in counts for name, count in golden.items() if count}
    assert passes - matched == {"normalize", "choose-layouts", "dequantize-linears", "separate-rounding"}


@pytest.mark.parametrize("case", drawn(5, [case for case in CASES if "4 layers" not in case]))
def test_where_there_is_a_kernel_every_rotation_is_fused_with_the_cache_write(case: str) -> None:
    context = pass_context(backends=(Cpu(), *BACKENDS), bucket=None)
    lowered = run_pipeline(traced(CASES[case]), context, (), upto=Stage.FUSED)
    (record,) = (record for record in lowered.records if record.name == "fuse-qk-norm-rope")
    dims = read_spec(CASES[case]).dims
    writing = len([*specs(dims, AttentionSpec)]) - len([*specs(dims, SharedAttentionSpec)])
    rotated = [attention for attention in specs(dims, AttentionSpec) if attention.rotary is not None][:writing]
    equal = [attention for attention in rotated if attention.value_width == attention.head_dim]
    assert record.matches == len(equal), "the fused op writes caches of equal widths"
    allowed = {
        f"{name} is not rotated: it is the result of {what}"
        for name in "qk"
        for what in ("aten.view.default", "ingot.rms_norm", "ingot.scale_by_position")
    }
    if equal != rotated:
        allowed.add("keys and values differ in width: the fused op writes caches of equal widths")
    if [*specs(dims, LatentAttentionSpec), *specs(dims, NormedLatentAttentionSpec)]:
        allowed = {"values are the first numbers of keys: the fused op writes keys and values of equal width"}
        if [*specs(dims, IndexerSpec)]:
            allowed = {"no attention reads the cache after this write"}  # but sparse attention, and the indexer
    assert {refusal.reason for refusal in record.refusals} <= allowed
