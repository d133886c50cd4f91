"""Groups of caches in `inspect`, `inspect --plan`, `explain` and the report, as a newcomer reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_text import command_text
from tiny import TINY

from ingot import compile_model
from ingot.ir.cache.summary import CacheSummary
from ingot.report.data import read_report
from ingot.report.payload import report_value
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.loading.plan_file import read_plan_file

pytestmark = pytest.mark.xdist_group("cache-groups")
OPTIONS: dict[str, Any] = {"backend": "reference", "max_batch": 2, "max_tokens": 64, "max_seq_len": 160, "jobs": 1}
FULL = "full         every token         3.6 kB       10 pages   10 pages  0       2 heads, keys of 14 numbers and"
# Of 64 tokens the first 31 are read by their own step alone: a page, which both layers have in common.
WINDOW = "window_33    the last 33 tokens  7.2 kB        3 pages    6 pages  1–2     2 heads, keys of 14 numbers and"
SCRATCH = "window_33: 1 scratch pages, 3.6 kB for all layers, hold keys and values of a long prompt for one step"
COMMANDS = (("inspect",), ("inspect", "--plan"), ("explain",))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("groups")

    def get(name: str) -> Path:
        if not (folder / f"{name}.ingot").exists():
            source = TINY[name].write(folder / name, sliding_window=33)
            compile_model(source, folder / f"{name}.ingot", **OPTIONS)
        return folder / f"{name}.ingot"

    return get


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_groups_are_shown(
    command: tuple[str, ...], compiled: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers that take turns: one keeps every token, two keep a window."""
    path = compiled("gemma3_text-new")
    text = command_text(capsys, command[0], path, *command[1:])
    assert f"\n{FULL} values of 14, f32\n{WINDOW} values of 14, f32\n" in text
    pages = "pages of 16 tokens that one sequence at full length holds at most; a step has up to 64 tokens"
    assert f"\nbetween steps, in a step: {pages}\n" in text
    assert "\nwindow_33: one more page, which replaces freed pages in page tables\n" in text
    assert f"\n{SCRATCH}\n" in text


def test_the_figures_are_those_of_serving(compiled: Callable[[str], Path]) -> None:
    """The bytes of a page are those of the states that are allocated, and the page counts hold in the pools."""
    path = compiled("gemma3_text-new")
    loaded = load_artifact(path, num_pages=4)
    for one in CacheSummary.of(loaded.plans).groups:
        names = [name for name, state in loaded.plan.states.items() if state.group == one.name]
        held = sum(loaded.executor.states[name].nbytes for name in names)
        assert loaded.pages[one.name] == 4 + one.reserved
        count = loaded.pages[one.name]
        if one.scratch_pages:
            scratch = loaded.scratch_pages[one.name]
            assert len(scratch) == one.scratch_pages and one.scratch_bytes * len(names) == len(scratch) * one.page_bytes
            count = scratch.stop
        assert held == count * one.page_bytes


def test_a_model_of_windows_alone(compiled: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = compiled("mistral-window")
    text, shown = command_text(capsys, "inspect", path), command_text(capsys, "inspect", path, "--json")
    assert "\nwindow_33    the last 33 tokens " in text and "every token" not in text
    (group,) = json.loads(shown)["caches"]["groups"]
    assert (group["between_steps"], group["in_step"], group["reserved"]) == (3, 6, 1)
    explained = json.loads(command_text(capsys, "explain", path, "--json"))
    assert explained["caches"] == json.loads(shown)["caches"]
    chosen = command_text(capsys, "explain", path, "--op", "linear")
    assert "cache group" not in chosen, "a filter asks for calls"
    report = report_value(read_report(open_artifact(path)))
    assert report["caches"] == CacheSummary.of(read_plan_file(open_artifact(path)).of(0)).to_json()
    memory = command_text(capsys, "inspect", path, "--plan")
    assert "a sequence at full length (3 pages, and 3 more in its largest step)" in memory
    assert "scratch pages" in memory and "(1 of window_33) for reads of one step" in memory
