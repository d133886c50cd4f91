"""Lines about tensors that differ only in numbers become one line with ranges."""

import random
import re
import time

import pytest

from ingot.frontend.name_ranges import joined


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], []),
        (["norm.weight [4]"], ["norm.weight [4]"]),
        (["layers.3.w [4]"], ["layers.3.w [4]"]),
        (["layers.0.w [4]", "layers.1.w [4]", "layers.3.w [4]"], ["layers.{0-1,3}.w [4]"]),
        (["layers.0.w [4]", "layers.1.w [5]"], ["layers.0.w [4]", "layers.1.w [5]"]),
        (
            [f"layers.{layer}.experts.{expert}.w1" for layer in (1, 2) for expert in range(4)]
            + ["layers.3.experts.0.w1"],
            ["layers.{1-2}.experts.{0-3}.w1", "layers.3.experts.0.w1"],
        ),
        (["a.0.w: found int8", "a.1.w: found int8"], ["a.{0-1}.w: found int8"]),
        (["a.10.w", "a.9.w"], ["a.{9-10}.w"]),
    ],
)
def test_ranges(lines: list[str], expected: list[str]) -> None:
    assert joined(lines) == expected


def test_every_name_is_in_one_range() -> None:
    """Read back, the lines have all the names, and each once."""
    draw = random.Random(0)
    names = {f"layers.{draw.randrange(4)}.experts.{draw.randrange(6)}.{draw.choice('ab')}.w" for _ in range(60)}
    assert sorted(name for line in joined(sorted(names)) for name in _spelled(line)) == sorted(names)


def _spelled(line: str) -> list[str]:
    found = re.search(r"\{([^}]*)\}", line)
    if found is None:
        return [line]
    values = []
    for run in found[1].split(","):
        first, _, last = run.partition("-")
        values += range(int(first), int(last or first) + 1)
    return [name for value in values for name in _spelled(line[: found.start()] + str(value) + line[found.end() :])]


def test_all_experts_of_a_large_model_are_one_line() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up.weight" for layer in range(61) for expert in range(256)]
    began = time.process_time()
    assert joined(names) == ["model.layers.{0-60}.mlp.experts.{0-255}.up.weight"]
    assert time.process_time() - began < 1
