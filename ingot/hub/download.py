"""Download files of a commit into the hub's cache, several at once, with progress in bytes."""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ingot.cli.console import ByteCount, size_text
from ingot.cli.progress import OnProgress
from ingot.hub.errors import disk_full, hub_error
from ingot.hub.name import HubName

_THREADS = 8  # the same as huggingface_hub's snapshot_download
_SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository on the hub. `size` is in bytes.

    `blob` is the name of its content in the hub's cache. It is "" if the hub's listing has no digest of the file.
    """

    size: int
    blob: str


@dataclass
class _Batch:
    """Names of files that several threads download.

    Each thread takes the next of `waiting`, until none is left or one fails. `done` are the downloaded files. `failed`
    has each failed file with its error.
    """

    waiting: deque[str]
    done: list[str] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)

    def work(self, get: Callable[[str], object]) -> None:
        while self.waiting and not self.failed:
            try:
                file = self.waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                get(file)
            except Exception as error:  # any error of the client and its libraries: the caller converts it
                self.failed.append((file, error))
            else:
                self.done.append(file)


def download(
    name: HubName,
    folder: Path,
    listing: Mapping[str, RemoteFile],
    batches: Sequence[Sequence[str]],
    progress: OnProgress,
) -> None:
    """Download the files of a commit of the repository `name` into `folder`, the commit's folder in the hub's cache.

    `listing` describes the commit's files by name. `batches` are lists of file names to download. A batch begins when
    all files of the previous batch are complete. Files that already exist are skipped. A file appears in `folder` only
    when it is complete. `progress` is called with the downloaded bytes and the total. Raises HubError.
    """
    missing = [[file for file in batch if not (folder / file).is_file()] for batch in batches]
    files = [file for batch in missing for file in batch]
    if not files:
        return
    blobs = folder.parents[1] / "blobs"
    coming = {file: listing[file] for file in files if not _has_blob(blobs, listing[file])}
    total = sum(one.size for one in coming.values())
    _check_room(folder, total)
    size = f", {size_text(total)}" if total else ""  # a mirror of the hub may list no sizes
    label = f"download {len(files)} file{'s' * (len(files) > 1)} of {name}{size}"
    finished: list[str] = []

    def report(batch: _Batch) -> None:
        whole = {*finished, *batch.done}
        held = sum(one.size if file in whole else _partly(blobs, one) for file, one in coming.items())
        progress(label, ByteCount(min(held, total)), ByteCount(total))

    with _no_bars_of_the_client():
        for some in missing:
            batch = _Batch(deque(some))
            _run(batch, lambda file: hf_hub_download(name.repository, file, revision=folder.name), report)
            if batch.failed:
                file, error = batch.failed[0]
                raise hub_error(error, name, file) from error
            finished += batch.done


def download_one(name: HubName, file: str) -> Path:
    """Return the path of a small file of the repository `name` in the hub's cache.

    If the cache lacks the file, it is downloaded first. The cache then also records the commit of the revision (branch
    or tag). Raises HubError.
    """
    with _no_bars_of_the_client():
        try:
            return Path(hf_hub_download(name.repository, file, revision=name.revision))
        except Exception as error:
            raise hub_error(error, name, file) from error


def _run(batch: _Batch, get: Callable[[str], object], report: Callable[[_Batch], None]) -> None:
    """Call `get` with each file of the batch, in several threads, until all files are done or one fails.

    The calling thread only waits, and calls `report` a few times a second. An interrupt ends this wait at once.
    """
    report(batch)
    count = min(_THREADS, len(batch.waiting))
    # Daemon threads, so that the process can exit in the middle of a large download.
    threads = [threading.Thread(target=batch.work, args=(get,), daemon=True, name="hub") for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        while threads and not batch.failed:
            threads[0].join(_SECONDS_BETWEEN_LOOKS)
            threads = [thread for thread in threads if thread.is_alive()]
            report(batch)
    finally:
        batch.waiting.clear()  # after an interrupt no thread starts another file


def _has_blob(blobs: Path, file: RemoteFile) -> bool:
    """Return whether the hub's cache already has the file's content, from another commit.

    `blobs` is the cache's folder of file contents.
    """
    return bool(file.blob) and (blobs / file.blob).is_file()


def _partly(blobs: Path, file: RemoteFile) -> int:
    """Return how many bytes of a file are downloaded so far.

    The hub's client writes them to a file `….incomplete` in `blobs`, a folder of the hub's cache.
    """
    if not file.blob:
        return 0
    held = 0
    for part in blobs.glob(f"{file.blob}*"):
        try:
            found = part.stat()
        except OSError:  # it has just become the blob
            return file.size
        held = max(held, min(found.st_size, found.st_blocks * 512))  # hf_xet writes sparse files
    return min(held, file.size)


def _check_room(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < total:
        raise disk_full(f": {size_text(total)} are to be downloaded, {size_text(free)} are free")


@contextmanager
def _no_bars_of_the_client() -> Iterator[None]:
    """Disable the progress bars of huggingface_hub inside the block, because Ingot shows its own progress."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
