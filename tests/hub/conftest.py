"""A hub that runs for each test, and processes that see it alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Client, Hub, running_hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as one:
        yield one


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(tmp_path, hub.url)
