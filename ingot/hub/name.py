"""Names of repositories on the hub, as in org/name@REVISION, told apart from paths. Importing this imports no HTTP
library.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ingot.ir.errors import HubError, OptionError

DEFAULT_REVISION = "main"

# The names that the hub accepts (huggingface_hub, utils/_validators.py, validate_repo_id), always with an organisation:
# all models have one, and a single word is more often a missing folder.
_WORD = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_WORD}/{_WORD}", re.ASCII)
_REVISION = re.compile(r"[\w][\w./+-]{0,254}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_NAMES = (".ingot", ".git")  # a missing artifact; the hub rejects names that end in .git


@dataclass(frozen=True)
class HubName:
    """A repository on the Hugging Face hub, such as "org/name", with a revision: a branch, a tag or a commit."""

    repository: str
    revision: str = DEFAULT_REVISION

    @property
    def pinned(self) -> bool:
        """Return whether the revision is a commit, 40 hexadecimal digits. A commit never changes, but a branch can."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return self.repository if self.revision == DEFAULT_REVISION else f"{self.repository}@{self.revision}"


def hub_name(checkpoint: str | Path, revision: str | None = None) -> HubName | None:
    """Return the hub repository that `checkpoint` names, or None for a local path.

    A name is "org/name" or "org/name@REVISION". `revision` is another way to pass REVISION. A Path is always local. A
    text is local if a file or folder of this name exists.

    Raises OptionError for a local folder with a revision, and for two revisions. Raises HubError for a name with a
    slash at the end.
    """
    text = str(checkpoint)
    repository, at, after = text.partition("@")
    if isinstance(checkpoint, Path) or is_there(text) or not _is_repository(repository):
        if revision is not None:
            raise OptionError(
                f"the revision {revision!r} of {text[:200]!r}",
                expected="a revision of a repository on the hub, as in org/name; a folder has none",
                hint="leave the revision out, or check the name: a local folder of that name comes first",
            )
        if text.endswith("/") and _is_repository(text.rstrip("/")) and not is_there(text):
            raise HubError(
                f"there is no folder {text!r}, and a repository on the hub is named without the slash at the end",
                hint=f"give {text.rstrip('/')!r} for the repository, or check the path",
            )
        return None
    if at and revision is not None:
        raise OptionError(f"two revisions, {after!r} and {revision!r}", where=text, expected="one of them")
    asked = after if at else DEFAULT_REVISION if revision is None else revision
    if not _REVISION.fullmatch(asked) or ".." in asked:
        raise OptionError(f"the revision {asked[:200]!r}", where=text, expected="a branch, a tag or a commit")
    return HubName(repository, asked)


def _is_repository(text: str) -> bool:
    return (
        _REPOSITORY.fullmatch(text) is not None
        and not text.endswith(_NO_NAMES)
        and "--" not in text
        and ".." not in text
    )


def is_there(path: str | Path) -> bool:
    """Return whether a file or folder exists at this path, even if it cannot be read."""
    try:
        return Path(path).exists()
    except PermissionError:
        return True
    except (OSError, ValueError):  # a name too long, a NUL in it
        return False
