"""HunYuan's rotary tables: an alpha stretches the base, whatever the length."""

from typing import Any

import pytest
from tiny import TINY

from ingot.ir.errors import ConfigError
from ingot.models.architectures import read_spec

CONFIG = TINY["hunyuan-alpha"].config


def test_alpha_stretches_the_base() -> None:
    (rope,) = read_spec(CONFIG).dims.ropes
    assert (rope.rope_type, rope.theta, rope.constants) == ("default", 811.0 * 7.0 ** (14 / 12), ())
    assert read_spec(CONFIG).max_position == CONFIG["max_position_embeddings"]


def test_without_alpha_it_is_dynamic() -> None:
    (rope,) = read_spec({**CONFIG, "rope_scaling": {"type": "dynamic", "factor": 2.0}}).dims.ropes
    assert rope.rope_type == "dynamic"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("alpha", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}),
        ("alpha", {"rope_scaling": {"type": "dynamic", "alpha": 1e29}}),
        ("alpha", {"head_dim": 2}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("rope_scaling", {"rope_scaling": "dynamic"}),
    ],
)
def test_bad_tables_are_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"\b{field}\b"):
        read_spec({**CONFIG, **changes})
