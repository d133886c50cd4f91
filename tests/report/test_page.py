"""The page as text: it is whole, the same every time, closed to the network, and data in it is never markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import math
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from ingot.ir.artifact.manifest import CHECKSUMS, TIMINGS
from ingot.ir.artifact.plan import PlanFile, Ref
from ingot.ir.parse import parse_type
from ingot.report.data import Step, linked
from ingot.report.page import MODULES, STYLES, joined_modules, report_page
from ingot.report.payload import compressed, delta
from ingot.web import shared_files

if TYPE_CHECKING:
    from pathlib import Path

    from ingot.report.data import Report

pytestmark = pytest.mark.xdist_group("report")
PAGE = files("ingot.report").joinpath("page")


class Elements(html.parser.HTMLParser):
    """Every element with its attributes and text, as a browser's parser takes the page apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1][2].append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.found if name == tag]


def payload_of(page: str) -> Any:
    (packed,) = (text for attributes, text in Elements(page).of("script") if attributes.get("id") == "payload")
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def applied(before: Sequence[int], changes: Sequence[tuple[int, int, list[int]]]) -> list[int]:
    made: list[int] = []
    place = 0
    for begin, end, lines in changes:
        made += [*before[place:begin], *lines]
        place = end
    return made + list(before[place:])


def test_a_delta_makes_the_second_list_of_the_first() -> None:
    draw = random.Random(0)
    for _ in range(200):
        before = [draw.randrange(9) for _ in range(draw.randrange(12))]
        after = [draw.choice(before) if before and draw.random() < 0.7 else draw.randrange(9) for _ in range(9)]
        assert applied(before, delta(before, after)) == after
    assert delta([1, 2], [1, 2]) == []


def test_the_payload_gives_every_program_back(region_report: Report) -> None:
    value = payload_of(report_page(region_report))
    lines: list[list[list[Any]]] = []
    for step, given in zip(value["steps"], region_report.steps, strict=True):
        base = [] if step["before"] is None else lines[step["before"]]
        lines.append(applied(base, step["delta"]))
        named = [value["lines"][line][1] for line in lines[-1] if value["lines"][line][0] == "call"]
        assert named == re.findall(r"^ *%(\S+) = ", given.text, re.MULTILINE)
    buckets = {step["bucket"] for step in value["steps"]}
    assert buckets == {None, "decode", "extend"}
    first = next(number for number, step in enumerate(value["steps"]) if step["bucket"] == "extend")
    assert value["steps"][first]["before"] == value["steps"].index(
        next(step for step in reversed(value["steps"]) if step["bucket"] is None)
    )


def test_memory_of_a_step_reaches_the_planned_peak_and_no_more(plain_report: Report, region_report: Report) -> None:
    for one in (*plain_report.memories, *region_report.memories):
        heights = [
            sum(storage.size for storage in one.storages if storage.first <= at <= storage.last) + one.scratch[at]
            for at in range(len(one.calls))
        ]
        assert heights[one.peak] == one.activations == max(heights)
    assert region_report.memories[1].scratch.count(0) < len(region_report.memories[1].scratch)


def test_storages_live_from_their_maker_to_their_last_reader(compiled: Path, plain_report: Report) -> None:
    (plan,) = PlanFile.model_validate_json((compiled / "plan.json").read_text()).of(0).plans.values()
    (bucket,) = plan.buckets
    (one,) = plain_report.memories
    expected: dict[str, list[int]] = {}
    for number, instruction in enumerate(bucket.instructions):
        read = [argument.ref for argument in instruction.args if isinstance(argument, Ref)]
        read += [argument.ref for argument in instruction.kwargs.values() if isinstance(argument, Ref)]
        for name in filter(None, instruction.results):
            expected.setdefault(bucket.values[name].of or name, [number, number])[1] = number
        for name in read:
            # An input may have the name of an output, which is made later.
            holder = bucket.values[name].of or name if name in bucket.values else name
            if holder in expected:
                expected[holder][1] = number
    expected = {name: lived for name, lived in expected.items() if name in bucket.values}
    outputs = {bucket.values[name].of or name for name in plan.outputs if name in bucket.values}
    for name in outputs & expected.keys():
        expected[name][1] = len(bucket.instructions) - 1
    assert {storage.name: [storage.first, storage.last] for storage in one.storages} == expected
    for storage in one.storages:
        value = bucket.values[storage.name]
        found = parse_type(value.storage or value.type)
        assert storage.size == math.prod(found.bind(one.sizes)) * found.dtype.itemsize


def test_a_step_knows_the_step_whose_program_it_was_given() -> None:
    def run(name: str, entry: str, bucket: str | None = None) -> Step:
        return Step(name, entry, bucket, "FUSED", "")

    runs = [
        run("cse", "main"),
        run("fuse", "main"),
        run("lower", "main", "decode"),
        run("plan", "main", "decode"),
        run("lower", "main", "extend"),
        run("cse", "draft"),
        run("lower", "draft", "decode"),
    ]
    steps = linked({"main": "program main", "draft": "program draft"}, runs)
    assert [step.name for step in steps] == ["traced", *(one.name for one in runs[:5]), "traced", "cse", "lower"]
    assert [step.before for step in steps] == [None, 0, 1, 2, 3, 2, None, 6, 7]
    assert [step.text for step in steps if step.before is None] == ["program main", "program draft"]


def test_the_same_report_is_the_same_page(plain_report: Report) -> None:
    assert report_page(plain_report) == report_page(plain_report)


def test_the_policy_lets_only_the_page_itself_in(plain_report: Report) -> None:
    elements = Elements(report_page(plain_report))
    (policy,) = (found["content"] for found, _ in elements.of("meta") if "http-equiv" in found)
    (style,) = (text for _, text in elements.of("style"))
    (script,) = (text for found, text in elements.of("script") if found.get("type") == "module")

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = ("default-src 'none'", f"script-src {digest(script)}", f"style-src {digest(style)}")
    assert policy == "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))
    linked = [(tag, name) for tag, found, _ in elements.found for name in found if name in ("src", "href", "style")]
    assert linked == []
    assert not re.search(r"@import|url\(|https?:(?!//www\.w3\.org/2000/svg)", style + script)


def test_hostile_text_stays_text(plain_report: Report) -> None:
    evil = "</script></title><img src=x onerror=alert(1)>{{payload}}&lt;"
    page = report_page(replace(plain_report, title=evil, target=evil, build_id=evil))
    elements = Elements(page)
    assert elements.of("img") == []
    assert len(elements.of("script")) == len(Elements(report_page(plain_report)).of("script"))
    assert elements.of("h1")[0][1].strip() == evil
    assert payload_of(page)["model"]["name"] == evil


def test_the_payload_has_no_sign_of_markup() -> None:
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", compressed({"a": "</script>\u2028<!--"}))


def test_modules_import_from_those_in_front_of_them() -> None:
    exported: dict[str, set[str]] = {}
    found = {**shared_files(), **{file.name: file for file in PAGE.iterdir()}}
    for name in MODULES:
        text = found[name].read_text(encoding="utf-8")
        for names, source in re.findall(r'^import \{([^}]*)\} from "\./([\w.]+)";$', text, re.MULTILINE):
            wanted = {one.strip() for one in names.split(",")} - {""}
            assert wanted <= exported[source], f"{name} imports {wanted - exported[source]} from {source}"
            for one in wanted:
                assert len(re.findall(rf"\b{one}\b", text)) > 1, f"{name} imports {one} and does not use it"
        exported[name] = set(re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", text, re.MULTILINE))
    names = [one for module in exported.values() for one in module]
    assert len(names) == len(set(names)), "all modules share one scope for what they export"
    assert found.keys() == {*MODULES, *STYLES, "page.html"}
    assert not shared_files().keys() & {file.name for file in PAGE.iterdir()}
    assert not re.search(r"^(import|export) ", joined_modules(), re.MULTILINE)


def test_what_was_not_recorded_is_not_made_up(compiled: Path, plain_report: Report, tmp_path: Path) -> None:
    from ingot.report.data import read_report
    from ingot.runtime.loading.artifact import open_artifact

    folder = tmp_path / "model.ingot"
    shutil.copytree(compiled, folder)
    (folder / TIMINGS).unlink()
    signed = (folder / CHECKSUMS).read_text().splitlines(keepends=True)
    (folder / CHECKSUMS).write_text("".join(line for line in signed if TIMINGS not in line))
    report = read_report(open_artifact(folder))
    assert report.times.phases == {} and all(step.seconds is None for step in report.steps)
    assert "compiled in" not in report_page(report)
    seconds = [step.seconds for step in plain_report.steps if step.before is not None]
    assert None not in seconds and sum(filter(None, seconds)) <= plain_report.times.phases["passes and executables"]
