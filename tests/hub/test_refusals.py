"""What cannot be had from the hub is said by name, and leaves nothing half-written."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from hub_server import CONFIG, SMALL, TOKEN, WHOLE, Client, Hub

from ingot.hub.name import HubName

pytestmark = pytest.mark.one_in_file(3)


def message(found: dict[str, str]) -> str:
    assert "error" in found, found
    return found["error"]


def test_a_name_that_does_not_exist(hub: Hub, client: Client) -> None:
    text = message(client.fetch("org/none"))
    assert text.startswith("HubError: there is no folder 'org/none', and no repository 'org/none' on the hub\n")
    assert hub.url in text and "if it is private, set HF_TOKEN" in text
    text = message(client.fetch("org/none", HF_TOKEN=TOKEN))
    assert "no repository 'org/none' on the hub that your token can see" in text and "HF_TOKEN" not in text


def test_a_private_repository_looks_like_none(hub: Hub, client: Client) -> None:
    hub.add("org/private", WHOLE).private = True
    assert "if it is private, set HF_TOKEN" in message(client.fetch("org/private"))


def test_a_gated_repository(hub: Hub, client: Client) -> None:
    hub.add("org/gated", WHOLE).gated = True
    text = message(client.fetch("org/gated"))
    assert text.startswith("HubError: the repository 'org/gated' is gated")
    assert f"{hub.url}/org/gated" in text and "set HF_TOKEN" in text
    assert "the token that was sent has no access yet" in message(client.fetch("org/gated", HF_TOKEN="hf_of_another"))
    assert hub.fetched() == []


def test_a_revision_that_does_not_exist(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", WHOLE)
    assert "the repository 'org/tiny' has no revision 'v9'" in message(client.fetch("org/tiny@v9"))
    client.fetch("org/tiny")
    assert "has no revision 'v9'" in message(client.fetch("org/tiny", "v9"))


def test_no_network_and_nothing_cached(client: Client) -> None:
    away = Client(client.folder, "http://127.0.0.1:1")
    text = message(away.fetch("org/tiny"))
    assert "no folder 'org/tiny', and the hub cannot be queried for a repository: Connect" in text
    assert "http://127.0.0.1:1" in text and "HF_ENDPOINT" in text


def test_offline_and_nothing_cached(hub: Hub, client: Client) -> None:
    text = message(client.fetch("org/tiny", HF_HUB_OFFLINE="1"))
    assert "no folder 'org/tiny'" in text and "offline mode is set (HF_HUB_OFFLINE)" in text
    assert str(client.cache) in text and "unset HF_HUB_OFFLINE" in text
    assert hub.asked == []


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_offline_and_a_file_is_missing(hub: Hub, client: Client, lost: str) -> None:
    hub.add("org/tiny", WHOLE)
    (Path(client.fetch("org/tiny")["folder"]) / lost).unlink()
    text = message(client.fetch("org/tiny", HF_HUB_OFFLINE="1"))
    assert "lacks files of 'org/tiny', and offline mode is set" in text and f"missing: {lost}" in text


def test_offline_and_shards_are_missing(hub: Hub, client: Client) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.dumps({"weight_map": {str(at): shard for at, shard in enumerate(shards)}}).encode()
    hub.add("org/tiny", {**SMALL, "model.safetensors.index.json": index, **dict.fromkeys(shards, b"w")})
    folder = Path(client.fetch("org/tiny")["folder"])
    for shard in shards[1:]:
        (folder / shard).unlink()
    assert f"missing: {shards[1]}, {shards[2]}\n" in message(client.fetch("org/tiny", HF_HUB_OFFLINE="1"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"p"}, ("pickle files: pytorch_model.bin", "save_pretrained")),
        ({"model-Q4_K_M.gguf": b"g", "README.md": b""}, ("GGUF files: model-Q4_K_M.gguf", "made from")),
        ({"consolidated.safetensors": b"c"}, ("not a transformers checkpoint: consolidated.safetensors",)),
        ({"README.md": b""}, ("holds no weights", "found there: ", "README.md")),
    ],
)
def test_a_repository_without_safetensors(
    hub: Hub, client: Client, files: dict[str, bytes], words: tuple[str, ...]
) -> None:
    for name, config in (("org/with", {"config.json": CONFIG}), ("org/without", {})):
        hub.add(name, {**files, **config})
        text = message(client.fetch(name))
        assert text.startswith("CheckpointError") and all(word in text for word in words)
    assert hub.fetched() == []


def test_a_repository_without_a_config(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", {"model.safetensors": b"w"})
    assert message(client.fetch("org/tiny")).startswith("ConfigError: the repository has no config.json")


def test_a_download_that_breaks_off_goes_on_later(hub: Hub, client: Client) -> None:
    repository = hub.add("org/tiny", WHOLE)
    repository.broken.add("model.safetensors")
    text = message(client.fetch("org/tiny"))
    assert "the download of 'model.safetensors' failed" in text and "try again" in text
    snapshots = list((client.cache / "models--org--tiny" / "snapshots").iterdir())
    assert [sorted(file.name for file in one.iterdir()) for one in snapshots] == [sorted(SMALL)]
    repository.broken.clear()
    hub.asked.clear()
    folder = Path(client.fetch("org/tiny")["folder"])
    assert (folder / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]
    assert hub.fetched() == ["model.safetensors"]


def test_a_disk_without_room_is_said_before_anything_is_downloaded(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", WHOLE).sizes["model.safetensors"] = 10**18
    text = message(client.fetch("org/tiny"))
    assert "the disk is full: 1000000.0 TB are to be downloaded" in text and str(client.cache) in text
    assert hub.fetched() == ["config.json"]


def test_a_cache_that_cannot_be_used(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", WHOLE)
    (client.folder / "file").write_text("")
    text = message(client.fetch("org/tiny", HF_HOME=str(client.folder / "file")))
    assert "the hub's cache cannot be used: Not a directory" in text and "set HF_HOME" in text


@pytest.mark.parametrize(
    ("status", "words"), [(500, "internal error"), (429, "accepts no more requests"), (401, "HF_TOKEN")]
)
def test_a_hub_that_does_not_serve(hub: Hub, client: Client, status: int, words: str) -> None:
    hub.add("org/tiny", WHOLE).status = status
    assert words in message(client.fetch("org/tiny"))


def test_a_place_that_is_no_hub(hub: Hub, client: Client) -> None:
    for url in (f"{hub.url}/elsewhere", "nowhere"):
        text = message(Client(client.folder, url).fetch("org/tiny"))
        assert "no folder 'org/tiny'" in text and "HF_ENDPOINT" in text


def test_a_full_disk_in_the_middle() -> None:
    from ingot.hub.errors import hub_error

    name = HubName("org/tiny")
    full = OSError(errno.ENOSPC, "No space left on device", "/cache/blob")
    told = RuntimeError("Data processing error: I/O error: No space left on device (os error 28)")  # as hf_xet's are
    wrapped = ValueError("download failed")
    wrapped.__cause__ = full
    for error in (full, told, wrapped):
        assert str(hub_error(error, name, "model.safetensors")).startswith("the disk is full\n")
