"""What is the name of a repository, and what is a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.hub.name import HubName, hub_name
from ingot.ir.errors import HubError, OptionError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "revision", "found"),
    [
        ("org/name", None, HubName("org/name", "main")),
        ("Qwen/Qwen3-0.6B", None, HubName("Qwen/Qwen3-0.6B", "main")),
        ("org/name", "v1.0", HubName("org/name", "v1.0")),
        ("org/name@v1.0", None, HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", None, HubName("org/name", "refs/pr/3")),
        (f"org/name@{COMMIT}", None, HubName("org/name", COMMIT)),
    ],
)
def test_names(text: str, revision: str | None, found: HubName) -> None:
    assert hub_name(text, revision) == found
    assert str(found) == (text if "@" in text else "org/name@v1.0" if revision else text)
    assert found.pinned == (found.revision == COMMIT)


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "/org/name",
        "./name",
        "../name",
        "~/name",
        "a/b/c",
        "org/name.ingot",
        "org/na--me",
        "org/na..me",
        "org/name.",
        "-org/name",
        "org\\name",
        "org/na me",
        "",
        "a\0/b",
        "x" * 5000,
        f"org/{'x' * 97}",
    ],
)
def test_paths(text: str) -> None:
    assert hub_name(text) is None


def test_what_is_there_wins(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert hub_name("org/name@v1") == HubName("org/name", "v1")  # which is not there
    (tmp_path / "org" / "name@v1").mkdir()
    assert hub_name("org/name@v1") is None
    assert hub_name("org/name/") is None
    with pytest.raises(OptionError, match="a folder has none"):
        hub_name("org/name", "v1")


def test_a_path_object_is_never_a_name() -> None:
    assert hub_name(Path("org/name")) is None


def test_a_slash_at_the_end_tells_both_readings() -> None:
    with pytest.raises(HubError, match=r"(?s)no folder 'org/name/'.*a repository on the hub.*give 'org/name'"):
        hub_name("org/name/")


@pytest.mark.parametrize(
    ("text", "revision", "message"),
    [
        ("org/name@v1", "v2", "two revisions, 'v1' and 'v2'"),
        ("org/name@", None, "the revision ''"),
        ("org/name", "", "the revision ''"),
        ("org/name@../main", None, "the revision '../main'"),
        ("org/name@a/../b", None, "the revision 'a/../b'"),
        ("org/name@a b", None, "the revision 'a b'"),
    ],
)
def test_revisions_that_are_none(text: str, revision: str | None, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        hub_name(text, revision)
