"""Convert errors of huggingface_hub into HubErrors that say what to do. Importing this imports huggingface_hub."""

import errno
from collections.abc import Iterator

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ingot.hub.name import HubName
from ingot.ir.errors import HubError

_DISK_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}
_OFFLINE = "offline mode is set (HF_HUB_OFFLINE)"
_TOKEN = "set HF_TOKEN to a token of yours, or log in with `hf auth login`"


def hub_error(error: BaseException, name: HubName, file: str = "") -> HubError:
    """Return the HubError for an error that huggingface_hub raised about the repository `name`.

    `file` is the file of a failed download. It is "" if the lookup of the repository failed. An unknown error counts as
    a network error, because huggingface_hub has changed its HTTP library twice.
    """
    for one in _chain(error):
        found = _of_disk(one) or _of_repository(one, name) or _of_status(one, name)
        if found is not None:
            return found
    if not file:
        return HubError(
            f"there is no folder '{name}', and the hub cannot be queried for a repository: {_reason(error)}",
            where=constants.ENDPOINT,
            expected="a network that reaches the hub, or a local folder",
            hint="check the path, the network, and HF_ENDPOINT and the proxy where they are set",
        )
    return HubError(
        f"the download of '{file}' failed: {_reason(error)}",
        where=_page(name),
        hint="try again: complete files are kept and not downloaded again",
    )


def unreached(error: BaseException, name: HubName) -> str:
    """Return in words why the repository `name` could not be looked up on the hub.

    The caller's message contains this text, and the state of the hub's cache.
    """
    for one in _chain(error):
        if isinstance(one, OfflineModeIsEnabled):
            return _OFFLINE
        if (found := _of_repository(one, name) or _of_status(one, name)) is not None:
            return found.what
    return f"the hub cannot be queried: {_reason(error)}"


def disk_full(needed: str = "") -> HubError:
    """Return the HubError for a full disk.

    `needed` is appended to its message, as in ": 2 GB are to be downloaded".
    """
    return HubError(
        f"the disk is full{needed}",
        where=f"the hub's cache, {constants.HF_HUB_CACHE}",
        hint="make room, or set HF_HOME to a folder with room; complete files are kept",
    )


def _of_disk(error: BaseException) -> HubError | None:
    number = error.errno if isinstance(error, OSError) else None
    # hf_xet is written in Rust; its errors have no errno.
    if number in _DISK_FULL or any(text in str(error) for text in _DISK_FULL.values()):
        return disk_full()
    if isinstance(error, OSError) and error.filename is not None:  # network errors have no file name
        return HubError(
            f"the hub's cache cannot be used: {error.strerror}",
            where=str(error.filename),
            hint="set HF_HOME to a folder of yours",
        )
    return None


def _of_repository(error: BaseException, name: HubName) -> HubError | None:
    repository = name.repository
    if isinstance(error, OfflineModeIsEnabled):
        return HubError(
            f"there is no folder '{name}', and the hub must not be queried for a repository: {_OFFLINE}",
            where=f"the hub's cache, {constants.HF_HUB_CACHE}",
            expected=f"'{name}' in that cache, or a local folder",
            hint="unset HF_HUB_OFFLINE, or download the repository where there is a network",
        )
    if isinstance(error, GatedRepoError):
        access = f"then {_TOKEN}" if get_token() is None else "the token that was sent has no access yet"
        return HubError(
            f"the repository '{repository}' is gated: its files need granted access",
            where=_page(name),
            hint=f"request access on that page; {access}",
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"the repository '{repository}' has no revision '{name.revision}'",
            where=_page(name),
            expected="one of its branches, tags or commits",
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        seen, login = ("", f"; if it is private, {_TOKEN}") if get_token() is None else (" that your token can see", "")
        return HubError(
            f"there is no folder '{name}', and no repository '{repository}' on the hub{seen}",
            where=constants.ENDPOINT,
            expected="a local folder with config.json, or the name of a repository, as in org/name",
            hint=f"check the path or the name{login}",
        )
    if isinstance(error, DisabledRepoError):
        return HubError(f"the repository '{repository}' was disabled by the hub", where=_page(name))
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return HubError(f"the hub lists a file of '{repository}' that it does not have", where=_page(name))
    return None


def _of_status(error: BaseException, name: HubName) -> HubError | None:
    status = getattr(error.response, "status_code", 0) if isinstance(error, HfHubHTTPError) else 0
    where = f"{_page(name)}, status {status}"
    if status in (401, 403):
        what = "requires a token" if get_token() is None else "refuses the token that was sent"
        return HubError(f"the hub {what}", where=where, hint=f"{_TOKEN}; it must be one that may read this repository")
    if status == 429:
        login = f", or {_TOKEN}: with one more requests are allowed" if get_token() is None else ""
        return HubError(
            "the hub accepts no more requests from this machine for now", where=where, hint=f"wait some minutes{login}"
        )
    if status >= 500:
        return HubError("the hub has an internal error", where=where, hint="try again later")
    return None


def _page(name: HubName) -> str:
    return f"{constants.ENDPOINT}/{name.repository}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that cause, and so on."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _reason(error: BaseException) -> str:
    """Return the class and the message of the error's cause, in one line of at most 300 characters.

    A LocalEntryNotFoundError is skipped, because it says only that the cache lacks a file. The error that prevented the
    download is its cause.
    """
    cause = next((one for one in _chain(error) if not isinstance(one, LocalEntryNotFoundError)), error)
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__
