"""A traced definition is what torch.export makes of it: the same text, origins included.

torch.export goes another way: it runs the definition on tensors of its own, below torch's dispatcher, with sizes as
expressions of sympy.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from exported import exported
from random_config import random_config
from run_seed import again, run_seed
from staged import LIMITS, traced
from tiny import QUICK, TINY

from ingot.ir.errors import IngotError
from ingot.ir.text import print_program

pytestmark = pytest.mark.one_in_file(3)

DRAWS = 6
FAMILIES = {TINY[name].family: TINY[name].config for name in reversed(TINY)}


def both_texts(config: Mapping[str, Any]) -> tuple[str, str]:
    """What the tracer makes of a config.json, and what torch.export does."""
    model = traced(config)
    ours, theirs = model.entries, exported(model, LIMITS)
    return "".join(map(print_program, ours.values())), "".join(map(print_program, theirs.values()))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TINY]
)
def test_a_definition_is_traced_as_torch_export_traces_it(name: str) -> None:
    ours, theirs = both_texts(TINY[name].config)
    assert ours == theirs
    assert re.search(r"layer \d+, blocks/(normed_)?(latent_)?attention\.py:", ours)  # a first layer may have none


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_so_are_random_configurations(family: str) -> None:
    known, compared = FAMILIES[family], 0
    for number in range(DRAWS):
        draw = random.Random(f"{run_seed()} tracer {family} {number}")
        config = random_config(known["architectures"][0], known["model_type"], draw)
        text = config.get("text_config", config)
        if "hidden_size_per_layer_input" in text and text["num_hidden_layers"] == 1:
            continue  # one layer takes a slice of everything, which torch.export writes as an alias
        try:
            ours, theirs = both_texts(config)
        except IngotError as refusal:  # of what a family does not have
            assert refusal.exit_code == 2, again(number)
            continue
        assert ours == theirs, f"{again(number)}\n{config}"
        compared += 1
    assert compared >= 2, again("of most")
