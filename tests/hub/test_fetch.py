"""What is downloaded of a repository, and when."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hub_server import CONFIG, SMALL, TOKEN, WHOLE, Client, Hub

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
BESIDE = {
    "README.md": b"# A model",
    "consolidated.safetensors": b"the same weights",
    "modeling_tiny.py": b"raise SystemExit",
    "model.fp16.safetensors": b"the same weights again",
    "model.gguf": b"and again",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"a pickle",
}


def test_only_what_is_needed_is_downloaded(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", {**WHOLE, **BESIDE})
    found = client.fetch("org/tiny")
    assert hub.fetched() == sorted(WHOLE)
    folder = Path(found["folder"])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == WHOLE
    assert found["origin"] == f"org/tiny@{hub.repositories['org/tiny'].revisions['main']}"
    assert folder.name == found["origin"].partition("@")[2]


def test_shards_are_those_of_the_index(hub: Hub, client: Client) -> None:
    shards = {shard: shard.encode() * 100 for shard in SHARDS}
    sharded = {**SMALL, "model.safetensors.index.json": INDEX, **shards}
    odd = {"model.safetensors": b"the same", "model-00003-of-00002.safetensors": b"left over"}
    hub.add("org/tiny", {**sharded, **odd, **BESIDE})
    folder = Path(client.fetch("org/tiny")["folder"])
    assert {file.name for file in folder.iterdir()} == sharded.keys()
    assert hub.fetched() == sorted(sharded)
    hub.add("org/torn", {**SMALL, "model.safetensors.index.json": INDEX, SHARDS[0]: b"w"})
    assert f"1 of 2 shards are not in the repository: {SHARDS[1]}" in client.fetch("org/torn")["error"]
    assert SHARDS[0] not in hub.asked[-5:]


def test_progress_is_in_bytes_and_ends_with_all(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", WHOLE)
    phases = client.fetch("org/tiny")["progress"]
    assert phases[0] == ["look for org/tiny on the hub", 0, 0, "0"]
    steps = phases[1:]
    assert {step[0] for step in steps} == {"download 4 files of org/tiny, 3.0 MB"}
    size = sum(len(data) for name, data in WHOLE.items() if name != "config.json")
    assert {step[2] for step in steps} == {size} and steps[0][1] == 0
    assert [step[1] for step in steps] == sorted(step[1] for step in steps)
    assert steps[-1][1:] == [size, size, "3.0 MB"]


def test_progress_moves_while_a_file_comes(hub: Hub, client: Client) -> None:
    # The client writes pieces of 10 MB (huggingface_hub, constants.DOWNLOAD_CHUNK_SIZE).
    hub.add("org/tiny", {**SMALL, "model.safetensors": b"w" * 48_000_000}).broken.add("model.safetensors")
    seen = {done for _, done, total, _ in client.fetch("org/tiny")["progress"] if total}
    assert any(10_000_000 <= done < 48_000_000 for done in seen)


def test_a_second_time_asks_for_the_commit_alone(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", WHOLE)
    first = client.fetch("org/tiny")
    hub.asked.clear()
    again = client.fetch("org/tiny")
    assert (again["folder"], again["origin"]) == (first["folder"], first["origin"])
    assert hub.asked == ["LIST org/tiny"]
    assert len(again["progress"]) == 1
    hub.asked.clear()
    assert client.fetch(first["origin"])["folder"] == first["folder"]  # a commit never changes
    assert hub.asked == []


def test_a_new_commit_brings_only_what_changed(hub: Hub, client: Client) -> None:
    repository = hub.add("org/tiny", WHOLE)
    first = client.fetch("org/tiny")
    hub.asked.clear()
    repository.commit({**WHOLE, "generation_config.json": b'{"temperature": 0.5}'})
    second = client.fetch("org/tiny")
    assert second["origin"] != first["origin"]
    assert hub.fetched() == ["generation_config.json"]
    assert {file.name for file in Path(second["folder"]).iterdir()} == WHOLE.keys()
    assert "download 4 files of org/tiny, 20 B" in {step[0] for step in second["progress"]}


def test_a_branch_that_moves_meanwhile_gives_one_commit(hub: Hub, client: Client) -> None:
    repository = hub.add("org/tiny", WHOLE)
    first = repository.revisions["main"]
    changed = {**WHOLE, "tokenizer.json": b"[]", "model.safetensors": b"v" * 1000}
    repository.moves_to = repository.commit(changed)
    repository.revisions["main"] = first
    found = client.fetch("org/tiny")
    assert found["origin"] == f"org/tiny@{repository.moves_to}"
    assert {file.name: file.read_bytes() for file in Path(found["folder"]).iterdir()} == changed


def test_revisions(hub: Hub, client: Client) -> None:
    repository = hub.add("org/tiny", WHOLE)
    pull = repository.commit({**WHOLE, "tokenizer.json": b"[]"}, "refs/pr/1")
    main = repository.revisions["main"]
    assert client.fetch("org/tiny", "refs/pr/1")["origin"] == f"org/tiny@{pull}"
    assert client.fetch("org/tiny@refs/pr/1")["origin"] == f"org/tiny@{pull}"
    assert client.fetch("org/tiny", main)["origin"] == f"org/tiny@{main}"
    assert client.fetch("org/tiny@refs/pr/1", HF_HUB_OFFLINE="1")["origin"] == f"org/tiny@{pull}"


def test_a_token_opens_what_is_private_or_gated(hub: Hub, client: Client) -> None:
    hub.add("org/private", WHOLE).private = True
    hub.add("org/gated", WHOLE).gated = True
    for name in ("org/private", "org/gated"):
        assert client.fetch(name, HF_TOKEN=TOKEN)["origin"].startswith(f"{name}@")


def test_a_local_folder_wins(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", WHOLE)
    (client.folder / "org" / "tiny").mkdir(parents=True)
    assert client.fetch("org/tiny") == {"folder": "org/tiny", "origin": "", "progress": []}
    assert hub.asked == []


def test_without_the_hub_the_cache_serves(hub: Hub, client: Client) -> None:
    hub.add("org/tiny", WHOLE)
    first = client.fetch("org/tiny")
    hub.asked.clear()
    away = Client(client.folder, "http://127.0.0.1:1")  # a port that nothing listens on
    for found, why in (
        (client.fetch("org/tiny", HF_HUB_OFFLINE="1"), "offline mode is set"),
        (away.fetch("org/tiny"), "the hub cannot be queried: ConnectionError|ConnectError"),
    ):
        assert (found["folder"], found["origin"]) == (first["folder"], first["origin"])
        assert any(one in found["progress"][-1][0] for one in why.split("|"))  # which is said
    hub.repositories["org/tiny"].status = 503
    assert "internal error" in client.fetch("org/tiny")["progress"][-1][0]
    assert hub.fetched() == []
    assert len(away.fetch(first["origin"])["progress"]) == 0


def test_files_that_a_repository_does_not_have_are_not_missed(hub: Hub, client: Client) -> None:
    bare = {"config.json": CONFIG, "model.safetensors": b"w"}
    hub.add("org/bare", bare)
    first = client.fetch("org/bare")
    assert client.fetch("org/bare", HF_HUB_OFFLINE="1")["folder"] == first["folder"]
    hub.asked.clear()
    client.fetch("org/bare")
    assert hub.asked == ["LIST org/bare"]
    client.fetch(first["origin"])
    assert hub.asked == ["LIST org/bare"]


def test_a_cache_that_another_program_filled(hub: Hub, client: Client) -> None:
    bare = {".gitattributes": b"", "config.json": CONFIG, "model.safetensors": b"w"}
    hub.add("org/bare", bare)
    script = (
        "import sys, huggingface_hub as hub; hub.snapshot_download('org/bare', allow_patterns=sys.argv[1:] or None)"
    )
    client.run(sys.executable, "-c", script, "*.safetensors", "config.json")
    part = client.fetch("org/bare", HF_HUB_OFFLINE="1")
    assert "missing: generation_config.json, tokenizer.json" in part["error"]
    client.run(sys.executable, "-c", script)
    whole = client.fetch("org/bare", HF_HUB_OFFLINE="1")
    assert {file.name for file in Path(whole["folder"]).iterdir()} == bare.keys()
    hub.asked.clear()
    assert client.fetch(whole["origin"])["folder"] == whole["folder"]
    assert hub.asked == []


def test_a_named_commit_is_asked_for_while_files_of_it_are_unknown(hub: Hub, client: Client) -> None:
    repository = hub.add("org/tiny", {**WHOLE, "chat_template.jinja": b"{{ messages }}"})
    script = "import sys, huggingface_hub as hub; hub.snapshot_download('org/tiny', allow_patterns=sys.argv[1:])"
    client.run(sys.executable, "-c", script, *WHOLE)
    folder = Path(client.fetch(f"org/tiny@{repository.revisions['main']}")["folder"])
    assert (folder / "chat_template.jinja").is_file()
