"""Files in the kernel's page cache, and out of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ingot.serve.engine.page_cache import drop_from_page_cache, read_into_page_cache

PAGE = 4096
# Longer than what the kernel reads ahead.
PAGES = 1024


def cached(path: Path) -> int:
    """The number of the file's pages that a read finds in the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # reads no pages ahead
        return sum(_reads_at_once(file.fileno(), page) for page in range(PAGES))


def _reads_at_once(descriptor: int, page: int) -> bool:
    try:
        return bool(os.preadv(descriptor, [bytearray(PAGE)], page * PAGE, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            pytest.skip("this file system does not say what is cached")
        raise


def test_files_enter_and_leave_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "empty").touch()
    weights = tmp_path / "inner" / "weights"
    weights.write_bytes(os.urandom(PAGE * PAGES))
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(weights) > PAGES // 4:
        pytest.skip("this file system keeps files in memory")
    read_into_page_cache(tmp_path)
    assert cached(weights) == PAGES
    drop_from_page_cache(tmp_path)
    assert cached(weights) <= PAGES // 4  # the kernel keeps pages that it is using
