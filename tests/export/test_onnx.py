"""The export to ONNX: tokens and logits in plain ONNX Runtime and in onnxruntime-genai, formats, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn import drawn
from even_sizes import even
from exported_model import LAYERS_FACTOR, Exported, decode, example, export_onnx_of, other_tokens
from quantized_files import MODEL, write_quantized
from tiny import TINY

from ingot import LLM, SamplingParams, compile_model
from ingot.export.export import export_model
from ingot.export.onnx.graph import CUSTOM_DOMAIN, CUSTOM_OPS
from ingot.export.onnx.quantized import block_of
from ingot.ir.errors import ExportError, OptionError, OutputError
from ingot.ir.formats import find_format
from ingot.ir.numerics.tolerances import compare

ROOT = Path(__file__).parents[2]
COUNT = 64
CASES = ("pico", "llama-plain", "qwen3-biased", "gemma3_text-new", "int4")
# Longer than the window of the tiny Gemma 3, which is 12.
PROMPT = [7, 300, 21, 5, 88, 140, 2, 61, 17, 33, 9, 250, 4, 71, 13, 6, 190]

pytestmark = [pytest.mark.xdist_group("onnx"), pytest.mark.one_in_file(3)]


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Exports a case once."""
    made: dict[str, Exported] = {}

    def export(name: str) -> Exported:
        if name not in made:
            folder = tmp_path_factory.mktemp("export")
            match name:
                case "pico":
                    made[name] = export_onnx_of(ROOT / "models" / "pico", folder / "onnx")
                case "int4":
                    checkpoint = even(TINY["llama-plain"]).write(folder / "checkpoint")
                    made[name] = export_onnx_of(checkpoint, folder / "onnx", quantize="int4_g32")
                case _:
                    made[name] = export_onnx_of(TINY[name].write(folder / "checkpoint"), folder / "onnx")
        return made[name]

    return export


def prompt_for(case: Exported) -> list[int]:
    vocab = next(iter(case.program.output_nodes().values())).meta["type"].shape[-1]
    return [token % vocab for token in PROMPT]


@pytest.mark.parametrize("name", CASES)
def test_plain_onnxruntime_generates_the_same_tokens(exported: Callable[[str], Exported], name: str) -> None:
    case = exported(name)
    prompt = prompt_for(case)
    tokens, logits = decode(case.folder, prompt, COUNT)
    reference = case.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert other_tokens(tokens, reference) == []
    assert (problem := compare(logits, reference, torch.float32, factor=LAYERS_FACTOR)) is None, problem


@pytest.mark.parametrize("name", CASES)
def test_genai_generates_the_same_tokens(exported: Callable[[str], Exported], name: str) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    case = exported(name)
    prompt = prompt_for(case)
    ends = json.loads((case.folder / "genai_config.json").read_text())["model"]["eos_token_id"]
    tokens = list(example("run_genai").generate(genai.Model(str(case.folder)), prompt, COUNT))
    assert len(tokens) == COUNT or tokens[-1] in ends
    reference = case.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert other_tokens(tokens, reference) == []


def test_the_examples_are_short() -> None:
    for name in ("run_onnx", "run_genai"):
        assert len((ROOT / "docs" / "examples" / f"{name}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_checked_and_its_weights_are_outside(exported: Callable[[str], Exported], name: str) -> None:
    import onnx

    path = exported(name).folder / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path), load_external_data=False)
    assert {node.op_type for node in model.graph.node if node.domain == CUSTOM_DOMAIN} <= set(CUSTOM_OPS)
    assert {node.domain for node in model.graph.node} == {"", CUSTOM_DOMAIN}
    weights = [one for one in model.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL]
    assert {entry.value for one in weights for entry in one.external_data if entry.key == "location"} == {
        "model.onnx.data"
    }
    inline = sum(one.ByteSize() for one in model.graph.initializer if one.data_location != onnx.TensorProto.EXTERNAL)
    assert weights and inline < 4096
    assert ("MatMulNBits" in {node.op_type for node in model.graph.node}) == (name == "int4")


def test_a_padded_batch_has_the_logits_of_each_sequence(exported: Callable[[str], Exported]) -> None:
    import numpy as np
    import onnxruntime

    case = exported("llama-plain")
    session = onnxruntime.InferenceSession(str(case.folder / "model.onnx"))
    names = [one.name for one in session.get_outputs()]
    long, short = PROMPT[:9], [token % 380 for token in PROMPT[9:13]]
    ids, mask = np.zeros((2, 9), np.int64), np.zeros((2, 9), np.int64)
    for row, one in enumerate((long, short)):
        ids[row, : len(one)], mask[row, : len(one)] = one, 1
    caches = {
        one.name: np.zeros((2, one.shape[1], 0, one.shape[3]), np.float32)
        for one in session.get_inputs()
        if one.name.startswith("past")
    }
    first = dict(zip(names, session.run(names, {"input_ids": ids, "attention_mask": mask, **caches}), strict=True))
    caches = {name.replace("present", "past_key_values"): first[name] for name in names[1:]}
    given = {"input_ids": np.array([[3], [5]]), "attention_mask": np.concatenate((mask, np.ones((2, 1), np.int64)), 1)}
    second = session.run(["logits"], {**given, **caches})[0]
    for row, one, more in ((0, long, 3), (1, short, 5)):
        reference = case.logits([*one, more])
        found = torch.from_numpy(np.concatenate((first["logits"][row, : len(one)], second[row])))
        assert compare(found, reference, torch.float32, factor=LAYERS_FACTOR) is None


def test_windows_are_in_the_configuration(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    case = exported("gemma3_text-new")
    config = json.loads((case.folder / "genai_config.json").read_text())["model"]
    assert config["type"] == "gemma3_text"
    window = config["decoder"]["sliding_window"]
    assert (window["window_size"], window["layers"]) == (12, [1, 2])
    assert "sliding_window" not in json.loads((exported("pico").folder / "genai_config.json").read_text())["model"]
    full = export_onnx_of(TINY["gemma3_text-new"].write(tmp_path / "ck"), tmp_path / "full", window_caches=False)
    assert "sliding_window" not in (full.folder / "genai_config.json").read_text()
    prompt = prompt_for(case)
    tokens, logits = decode(full.folder, prompt, 4)
    assert compare(logits, full.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :], torch.float32, factor=10) is None


def test_a_window_of_the_whole_sequence_is_none(tmp_path: Path) -> None:
    checkpoint = TINY["gemma3_text-new"].write(tmp_path / "ck")
    short = export_onnx_of(checkpoint, tmp_path / "onnx", max_seq_len=12)
    assert "sliding_window" not in (short.folder / "genai_config.json").read_text()


def test_bfloat16_becomes_float32_and_float16_stays(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "ck", torch_dtype="bfloat16")
    report = export_model(checkpoint, tmp_path / "auto", to="onnx")
    assert report.notes[0] == "bfloat16 weights are written as float32"
    half = export_onnx_of(checkpoint, tmp_path / "half", dtype="float16")
    tokens, logits = decode(half.folder, [5, 17, 3], 4)
    reference = half.logits([5, 17, 3, *tokens[:-1]])[2:]
    assert (problem := compare(logits, reference, torch.float16, factor=LAYERS_FACTOR)) is None, problem
    sizes = [(tmp_path / name / "model.onnx.data").stat().st_size for name in ("auto", "half")]
    assert sizes[1] < 0.6 * sizes[0]


FORMATS = {  # the blocks of MatMulNBits for rows of 128; 0: decoded
    "int8": 128,
    "int8_g64": 64,
    "int4_g32": 32,
    "int4_g128": 128,
    "int4_g32_asym": 32,
    "mxfp4": 0,
    "nf4": 0,
}


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_blocks_of_formats(format: str) -> None:
    assert block_of(find_format(format), 128) == FORMATS[format]


@pytest.mark.parametrize("format", drawn(3, sorted(FORMATS)))
def test_quantized_weights(tmp_path: Path, format: str) -> None:
    checkpoint = MODEL.write(tmp_path / "ck")
    case = export_onnx_of(checkpoint, tmp_path / "onnx", quantize=format)
    decoded = [note for note in case.report.notes if "MatMulNBits has no form" in note]
    assert bool(decoded) == (FORMATS[format] == 0)
    tokens, logits = decode(case.folder, [5, 17, 3, 60], 4)
    reference = case.logits([5, 17, 3, 60, *tokens[:-1]])[3:]
    assert (problem := compare(logits, reference, torch.float32, factor=LAYERS_FACTOR)) is None, problem


def awq(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
    """A linear as the GEMM form of AWQ stores it: groups of 32, with zero points."""
    if "lm_head" in module:
        return None
    draw = torch.Generator().manual_seed(len(module))
    groups, rows = weight.shape[1] // 32, weight.shape[0]
    scales = (weight.abs().max() / 7 * (0.5 + torch.rand(groups, rows, generator=draw))).half()
    zeros = torch.randint(0, 16, (groups, rows), generator=draw)
    wide, zero = (one.repeat_interleave(32, 0) for one in (scales.float(), zeros))
    codes = ((weight.T / wide).round().long() + zero).clamp(0, 15)

    def words(of: torch.Tensor) -> torch.Tensor:
        eight = of.long().unflatten(-1, (-1, 8))
        shifted = [eight[..., output] << (4 * nibble) for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7))]
        return torch.stack(shifted).sum(0).to(torch.uint32).view(torch.int32)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}, ((codes - zero).float() * wide).T


def test_a_quantized_checkpoint_keeps_its_codes(tmp_path: Path) -> None:
    described = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    written = write_quantized(tmp_path / "ck", described, awq)
    case = export_onnx_of(written.folder, tmp_path / "onnx")
    assert not [note for note in case.report.notes if "MatMulNBits" in note]
    tokens, logits = decode(case.folder, [5, 17, 3, 60], 4)
    reference = case.logits([5, 17, 3, 60, *tokens[:-1]])[3:]
    assert (problem := compare(logits, reference, torch.float32, factor=LAYERS_FACTOR)) is None, problem


def test_an_odd_number_of_blocks_with_zero_points(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "ck", intermediate_size=96)  # three blocks in a row of `down`
    case = export_onnx_of(checkpoint, tmp_path / "onnx", quantize="int4_g32_asym")
    tokens, logits = decode(case.folder, [5, 17, 3, 60], 2)
    reference = case.logits([5, 17, 3, 60, *tokens[:-1]])[3:]
    assert compare(logits, reference, torch.float32, factor=LAYERS_FACTOR) is None


REFUSED = {
    "bloom-tied": "ALiBi slopes",
    "mixtral-window": "ingot.experts",
    "deepseek_v2-lite": "ingot.latent_attention",
    "gemma3n_text-shared": "share the cache",
    "decilm-heads": "layers with different caches",
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_form_is_refused_by_name(tmp_path: Path, name: str) -> None:
    checkpoint = TINY[name].write(tmp_path / "ck")
    with pytest.raises(ExportError, match=REFUSED[name]):
        export_model(checkpoint, tmp_path / "onnx", to="onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_activations_that_are_rounded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="'int8_w8a8', which rounds activations"):
        export_model(MODEL.write(tmp_path / "ck"), tmp_path / "onnx", to="onnx", quantize="int8_w8a8")


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "ck", eos_token_id=None)
    with pytest.raises(ExportError, match="no token that ends a sequence"):
        export_model(checkpoint, tmp_path / "onnx", to="onnx")


def test_bad_arguments(tmp_path: Path) -> None:
    checkpoint = MODEL.write(tmp_path / "ck")
    for error, match, changes in (
        (OptionError, "unknown form 'gguf'", {"to": "gguf"}),
        (OptionError, "--entry pooled with --to onnx", {"to": "onnx", "entry": "pooled"}),
        (OptionError, "no entry 'pooled'", {"to": "torch", "entry": "pooled"}),
        (ExportError, "for a mesh", {"to": "onnx", "mesh": {"tp": 2}}),
        (OptionError, "--checkpoint without an artifact", {"to": "onnx", "checkpoint": "elsewhere"}),
    ):
        with pytest.raises(error, match=match):
            export_model(checkpoint, tmp_path / "out", **changes)  # type: ignore[arg-type]
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        export_model(checkpoint, tmp_path / "out", to="onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "out"]


@pytest.mark.slow
def test_a_served_artifact_generates_the_same_tokens(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    """Compiled and served by Ingot, in the dtype of the export; the reference program alone decides about ties."""
    case, artifact = exported("pico"), tmp_path / "pico.ingot"
    compile_model(ROOT / "models" / "pico", artifact, target="cpu", backend="reference", dtype="float32")
    llm = LLM(artifact)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    for prompt in ([369, 12, 1911], PROMPT):
        served = list(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
        tokens, _ = decode(case.folder, prompt, COUNT)
        both = zip(served, tokens, strict=True)
        same = next((place for place, (one, other) in enumerate(both) if one != other), COUNT)
        reference = case.logits([*prompt, *served[:-1]])[len(prompt) - 1 :]
        # Up to the first tie, the tokens are equal.
        assert same == COUNT or other_tokens([tokens[same]], reference[same : same + 1]) == []
        assert other_tokens(served, reference) == []


def families() -> list[str]:
    """Tiny checkpoints that no other test exports; those that are refused have a test of their own."""
    return sorted(name for name in TINY if name not in (*CASES, *REFUSED))


@pytest.mark.parametrize("name", drawn(2, families()))
def test_a_family_is_exported_or_refused(tmp_path: Path, name: str) -> None:
    tiny = TINY[name]
    checkpoint = tiny.write(tmp_path / "ck")
    try:
        case = export_onnx_of(checkpoint, tmp_path / "onnx", max_seq_len=tiny.max_seq_len)
    except ExportError:
        assert not (tmp_path / "onnx").exists()
        return
    prompt = [token % tiny.config["vocab_size"] for token in PROMPT * 2]
    tokens, logits = decode(case.folder, prompt, 8)
    reference = case.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert (problem := compare(logits, reference, torch.float32, factor=LAYERS_FACTOR)) is None, problem


def test_a_changed_weight_shows(exported: Callable[[str], Exported]) -> None:
    """The comparison can fail: one weight of a norm, doubled in the reference, is another model."""
    case = exported("llama-plain")
    name = next(one for one in case.values if one.endswith("mlp_norm.weight"))
    other = replace(case, values={**case.values, name: case.values[name] * 2})
    tokens, logits = decode(case.folder, PROMPT, 4)
    reference = other.logits([*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :]
    assert compare(logits, reference, torch.float32, factor=LAYERS_FACTOR) is not None
