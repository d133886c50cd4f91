"""Prose avoids the words that docs/tools/words.py lists: the words that it finds, and its limits by room."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "docs" / "tools"


@pytest.fixture(scope="module")
def words() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        import words

        yield words
    sys.modules.pop("words")


def test_listed_limits_are_above_the_limit_of_all_rooms(words: ModuleType) -> None:
    listed = json.loads(words.LIMITS.read_text(encoding="utf-8"))
    assert listed.keys() <= set(words.ROOMS) and all(limit > words.LIMIT for limit in listed.values())


def test_limits_only_fall(words: ModuleType) -> None:
    allowed = {"ir": 20, "docs": 9, "passes": 4, "models": 30}
    assert words.lowered(allowed, {"ir": 11.2, "docs": 12.0, "models": 3.0}) == {"ir": 12, "docs": 9}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A write behind a read.", ["behind"]),
        ("It runs behind a proxy.", []),
        ("The product of two weights; an inner product.", ["product"]),
        ("Kinds are told apart. The engine is told.", ["told"]),
        ("The name stands for a group and stands there.", ["stands"]),
        ("What a step holds is bounded. Done.", ["What a step holds is bounded …"]),
        ("What does a step hold? It holds tokens.", []),
        ("The scheduler reads `what stands behind` it.", []),
    ],
)
def test_words_are_found(text: str, found: list[str], words: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Behind\n\n{text}\n\n```\nbehind\n```\n")
    assert [one.word for one in words.count(page).found] == found


def test_prose_of_a_module_is_its_docstrings_and_comments(words: ModuleType, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Behind one."""\n\nbehind = "behind"  # behind two\n# A comment of\n# two lines.  # noqa: E501\n\n'
        'def f():\n    """Return it.\n\n    Nobody three.\n    """\n'
    )
    counted = words.count(module)
    assert [(one.line, one.word) for one in counted.found] == [(1, "Behind"), (3, "behind"), (10, "Nobody")]
    assert counted.lines == 6


def test_expressions_have_no_groups_of_their_own(words: ModuleType) -> None:
    assert all(re.compile(word).groups == 0 for word in words.WORDS)
