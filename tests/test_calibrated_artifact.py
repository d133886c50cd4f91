"""Weights quantized with a calibration text, from the options of a compile to tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_model import write_model, write_text
from command_text import command_text
from drawn import in_one_of
from serve_artifact import Job, serve

from ingot import compile_model
from ingot.compile.compile_report import CompileReport
from ingot.compile.recorded_request import recorded_request
from ingot.compile.request import Request
from ingot.debug.bisect.driver import bisect
from ingot.ir.errors import CalibrationError, OptionError
from ingot.ir.mesh import ranks
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.weights import map_weights

pytestmark = [pytest.mark.xdist_group("calibrated"), pytest.mark.one_in_file(3)]
LIMITS = {"max_batch": 4, "max_tokens": 64, "max_seq_len": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    write_model(folder / "checkpoint")
    write_text(folder / "words.txt")
    write_text(folder / "others.txt", seed=1)
    return folder


def compiled(folder: Path, name: str, **options: Any) -> CompileReport:
    given = {"target": "cpu", "backend": "reference", **LIMITS, **options}
    return compile_model(folder / "checkpoint", folder / name, **given)


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_every_pass_keeps_its_contract(folder: Path, method: str) -> None:
    report = compiled(
        folder,
        f"{method}.ingot",
        quantize="int4_g32",
        quantize_method=method,
        calibrate=folder / "words.txt",
        check_numerics=True,
    )
    assert report.quantization is not None and report.quantization.method == method
    assert len(report.quantization.linears) == 21 and 0 < report.quantization.kl < 1
    assert open_artifact(folder / f"{method}.ingot").read_json("quantization.json") == json.loads(
        report.quantization.model_dump_json()
    )


@in_one_of(3)
def test_a_bisect_finds_no_fault(folder: Path) -> None:
    compiled(folder, "sound.ingot", quantize="int4_g32", quantize_method="awq", calibrate=folder / "words.txt")
    assert not bisect(folder / "sound.ingot")


def test_it_is_served(folder: Path) -> None:
    compiled(folder, "served.ingot", quantize="int8", calibrate=folder / "words.txt")
    prompts = [[5, 17, 3, 60], [11]]
    result = serve(Job(str(folder / "served.ingot"), prompts, prompts, 6, chunked=False))
    assert all(len(tokens) == 6 for tokens in result.tokens)


def test_the_text_is_part_of_the_identity(folder: Path) -> None:
    def key(text: str, **options: Any) -> str:
        request = Request.read(
            folder / "checkpoint",
            **{"target": "cpu", "quantize": "int4_g32", "calibrate": folder / text, **LIMITS, **options},
        )
        return request.key(request.trace())

    (folder / "copy.txt").write_bytes((folder / "words.txt").read_bytes())
    keys = [key("words.txt"), key("others.txt"), key("words.txt", quantize_method="awq")]
    assert len(set(keys)) == 3 and key("copy.txt") == keys[0]


def test_options_of_a_recorded_request_make_it_again(folder: Path) -> None:
    given: dict[str, Any] = {
        "quantize": "int4_g32",
        "quantize_ignore": ["lm_head", "layers.0.*"],
        "quantize_overrides": {"*.down_proj": "int8"},
        "calibrate": folder / "words.txt",
    }
    report = compiled(folder, "again.ingot", **given)
    request = recorded_request(open_artifact(folder / "again.ingot"))
    assert request.key(request.trace()) == report.request_key
    assert report.quantization is not None
    formats = {one.weight: one.format for one in report.quantization.linears}
    assert formats["layers.1.mlp.down.weight"] == "int8" and formats["layers.1.mlp.up.weight"] == "int4_g32"
    assert not any(name.startswith("layers.0.") for name in formats) and len(formats) == 14


def test_without_a_text_weights_are_rounded(folder: Path) -> None:
    report = compiled(folder, "rounded.ingot", quantize="int8", quantize_head=True)
    assert report.quantization is None
    names = open_artifact(folder / "rounded.ingot").read_json("weights.json")
    assert isinstance(names, dict) and sum(name.endswith("qweight") for name in names) == 3 * 4 + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize_ignore": ["layer.0.*"]}, r"the pattern 'layer\.0\.\*' matches no linear"),
        ({"quantize_overrides": {"*.experts.*": "int8"}}, r"matches no linear"),
        ({"passes": "default,quantize{format=int8}"}, "the pass quantize in addition to the option quantize"),
        ({"quantize": "int4_g64"}, "does not fit"),
        ({"max_loras": 1, "quantize_method": "awq"}, "keeps the inputs that adapters"),
    ],
)
def test_options_that_do_not_fit_the_model(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        compiled(folder, "never.ingot", **{"quantize": "int8", "calibrate": folder / "words.txt", **options})
    assert not (folder / "never.ingot").exists()


def test_a_text_that_is_too_short(folder: Path) -> None:
    (folder / "short.txt").write_text("too short")
    with pytest.raises(CalibrationError, match="at least 96 of each"):
        compiled(folder, "never.ingot", quantize="int8", calibrate=folder / "short.txt")


def test_a_second_compile_finds_the_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(folder, "first.ingot", quantize="int4_g32", calibrate=folder / "others.txt")
    monkeypatch.setattr("ingot.compile.calibrating.calibrate", None)  # calling it would fail
    second = compiled(folder, "second.ingot", quantize="int4_g32", calibrate=folder / "others.txt", trace="none")
    assert first.quantization is not None and second.quantization == first.quantization


def test_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "command.ingot")
    arguments = ["compile", str(folder / "checkpoint"), "-o", path, "--target", "cpu", "--backend", "reference"]
    arguments += ["--quantize", "int4_g32", "--quantize-overrides", "*.down=int8", "--quantize-ignore", "layers.2.*"]
    arguments += ["--calibrate", str(folder / "words.txt"), "--max-seq-len", "96"]
    out = command_text(capsys, *arguments)
    assert "12 linears int4_g32, 2 linears int8, by gptq" in " ".join(out.split())
    assert "Linears that quantizing changes most" in out
    assert len(json.loads(command_text(capsys, "inspect", path, "--quantization", "--json"))["linears"]) == 14
    assert "layers.0.mlp.down.weight" in command_text(capsys, "inspect", path, "--quantization")
    assert "12 linears int4_g32" in " ".join(command_text(capsys, "inspect", path).split())


def test_a_wrong_scale_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that forgets the rows of `up` changes the function; the numerics check names the weight."""
    from ingot.ir.errors import NumericsError
    from ingot.quantizing.calibrate import _Work

    stored = _Work._write

    def forgetful(self: _Work, name: str) -> None:
        if name == "layers.1.mlp.up.weight" and name in self._waiting:
            self._waiting[name]["scales"] = self._waiting[name]["scales"] * torch.tensor(3.0)
        stored(self, name)

    monkeypatch.setattr(_Work, "_write", forgetful)
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up\.qweight"):
        compiled(
            folder,
            "wrong.ingot",
            quantize="int4_g32_asym",
            quantize_method="awq",
            calibrate=folder / "words.txt",
            check_numerics=True,
        )


def test_a_mesh_splits_what_a_calibration_stored(folder: Path) -> None:
    """Each rank's parts together are the parts without a mesh, and every pass keeps its contract."""
    given: dict[str, Any] = {
        "quantize": "int4_g32",
        "quantize_method": "awq",
        "quantize_ignore": ["*.down"],
        "calibrate": folder / "words.txt",
        "passes": "default,-merge-linears",
        "check_numerics": True,
    }
    compiled(folder, "whole.ingot", **given)
    compiled(folder, "split.ingot", **given, mesh={"tp": 2})
    whole = map_weights(open_artifact(folder / "whole.ingot"))
    parts = [map_weights(open_artifact(folder / "split.ingot"), rank) for rank in ranks({"tp": 2})]
    for name, dim in (("layers.1.attention.q.qweight", 0), ("layers.1.attention.o.scales", 1)):
        assert torch.equal(torch.cat([part[name] for part in parts], dim), whole[name])


def test_a_quantized_checkpoint_is_not_quantized_again(folder: Path) -> None:
    quantized = write_model(folder / "fp8")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="quantized already"):
        compile_model(quantized, folder / "never.ingot", target="cpu", backend="reference", quantize="int8", **LIMITS)
