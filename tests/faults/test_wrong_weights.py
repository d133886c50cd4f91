"""Weights with right digests that do not bind, and files that hold something else."""

import re
from pathlib import Path
from typing import Any

import pytest
from damaged import reference, refusal
from resign import Edit, edit_json, sign

NORM = "norm.weight"
WRONG_WEIGHTS: dict[str, tuple[Edit, str]] = {
    "a weight missing": (lambda w: w.pop(NORM), "weight 'norm.weight' is missing"),
    "no place": (lambda w: w[NORM].pop("file"), "weights.json is malformed: norm.weight"),
    "two places": (lambda w: w[NORM].update(same_as="embed.weight"), "weights.json is malformed: norm.weight"),
    "a list": (lambda w: w.update({NORM: []}), "weights.json is malformed: norm.weight"),
    "a field too many": (lambda w: w[NORM].update(scale=2.0), "malformed: norm.weight.scale"),
    "an unknown dtype": (lambda w: w[NORM].update(dtype="f33"), "the dtype is 'f33'"),
    "another dtype": (lambda w: w[NORM].update(dtype="i32"), "'norm.weight' has dtype i32"),
    "another shape": (lambda w: w[NORM].update(shape=[74]), "'norm.weight' has shape"),
    "another rank": (lambda w: w[NORM].update(shape=[75, 1]), "'norm.weight' has shape"),
    "a negative size": (lambda w: w[NORM].update(shape=[-75]), "malformed: norm.weight.shape"),
    "two negative sizes": (lambda w: w[NORM].update(shape=[-5, -15]), "malformed: norm.weight.shape"),
    "a size of no elements": (lambda w: w[NORM].update(shape=[0]), "'norm.weight' has shape"),
    "a fraction": (lambda w: w[NORM].update(shape=[75.5]), "malformed: norm.weight.shape"),
    "a truth value": (lambda w: w[NORM].update(shape=[True]), "malformed: norm.weight.shape"),
    "a huge size": (lambda w: w[NORM].update(shape=[1 << 62]), "it is at bytes"),
    "huge sizes": (lambda w: w[NORM].update(shape=[1 << 40, 1 << 40]), "it is at bytes"),
    "a size beyond 64 bits": (lambda w: w[NORM].update(shape=[1 << 70]), "malformed: norm.weight.shape"),
    "a negative offset": (lambda w: w[NORM].update(offset=-4), "malformed: norm.weight.offset"),
    "an offset past the end": (lambda w: w[NORM].update(offset=1 << 40), "it is at bytes"),
    "an odd offset": (lambda w: w[NORM].update(offset=w[NORM]["offset"] + 1), "at a multiple of 4"),
    "a file that is no weight file": (lambda w: w[NORM].update(file="plan.json"), "the file 'plan.json' is none"),
    "a file outside": (lambda w: w[NORM].update(file="../../etc/passwd"), "the file '../../etc/passwd' is none"),
    "an unknown original": (
        lambda w: w.update({NORM: {**unplaced(w), "same_as": "nothing"}}),
        "same_as is 'nothing'",
    ),
    "its own original": (lambda w: w.update({NORM: {**unplaced(w), "same_as": NORM}}), "same_as is 'norm.weight'"),
    "another original": (
        lambda w: w.update({NORM: {**unplaced(w), "same_as": "embed.weight"}}),
        "'norm.weight' has shape",
    ),
}


def unplaced(weights: Any) -> dict[str, Any]:
    return {name: item for name, item in weights[NORM].items() if name not in ("file", "offset")}


@reference
@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_do_not_bind(plain: Path, case: str) -> None:
    edit, message = WRONG_WEIGHTS[case]
    edit_json(plain, "weights.json", edit)
    assert re.search(message, refusal(plain))


@reference
@pytest.mark.parametrize(
    "text", ["", "[]", "null", "7", '{"a": 1', '{"a": NaN}', "[" * 100_000, '"\\ud800"', "\ufeff{}"]
)
@pytest.mark.parametrize("relpath", ["plan.json", "weights.json"])
def test_files_that_hold_something_else(plain: Path, relpath: str, text: str) -> None:
    (plain / relpath).write_text(text)
    sign(plain, relpath)
    assert relpath in refusal(plain)
