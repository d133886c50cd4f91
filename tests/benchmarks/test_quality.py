"""quality.py: its figures, and that `--quantize auto` keeps its bound on models that it trains."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def quality(benchmarks: None) -> ModuleType:
    return importlib.import_module("quality")


def test_figures_of_pico(quality: ModuleType) -> None:
    windows = [[index * 37 % 4096 for index in range(40)], [index * 91 % 4096 for index in range(40)]]
    cases = [case for case in quality.CASES if case.name in ("int8.rtn", "int4_g128.rtn", "kv_fp8.none")]
    found = dict(quality.pico_figures(windows, cases))
    assert len(found) == 1 + 3 * len(cases)
    assert 0 < found["int8.rtn.kl"].value < found["int4_g128.rtn.kl"].value
    assert found["int4_g128.rtn.bytes"].value < found["int8.rtn.bytes"].value < found["kv_fp8.none.bytes"].value
    assert found["kv_fp8.none.kl"].value > 0


def test_another_library_is_refused(quality: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="is not the library of CPython"):
        quality.held_out(tmp_path, 4)


def test_each_case_is_a_compile(quality: ModuleType) -> None:
    from ingot.compile.request import Request

    for case in quality.CASES:
        request = Request.read(quality.PICO, target="cpu", **case.options)
        assert (request.quantize is None) == case.format.startswith("kv_")
    assert len({case.name for case in quality.CASES}) == len(quality.CASES)


@pytest.mark.slow
def test_auto_keeps_its_bound_on_three_models(quality: ModuleType, tmp_path: Path) -> None:
    found = dict(quality.auto_figures(tmp_path, steps=60, bounds=(0.00003, 0.0003)))
    assert len(found) == 3 * 2 * 3
    for name, figure in found.items():
        bound = float(name.partition(".")[2].rpartition(".")[0])
        if name.endswith(".kl"):
            assert figure.value <= bound, name
        if name.endswith(".again"):
            assert figure.value <= 1.1 * bound + 5e-5, "bfloat16 activations add what they do without quantizing"
        if name.endswith(".bytes"):
            assert figure.value <= 1
    for model in ("llama", "qwen2", "gpt2"):
        tight, loose = (found[f"auto_{model}.{bound}.bytes"].value for bound in (0.00003, 0.0003))
        assert loose <= tight
