"""`ingot run`: text and JSON, chats, draws, stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_world import END, Command, World, write_checkpoint

import ingot.cli.main as cli

pytestmark = [pytest.mark.xdist_group("cli"), pytest.mark.one_in_file(3)]


def test_run_echoes_and_streams(world: World, ingot: Command) -> None:
    done = ingot("run", world.artifact, "def f(x):\treturn", "--max-tokens", 8, "--ignore-eos")
    assert done.code == 0
    assert done.out.startswith("def f(x):\treturn") and done.out.endswith("\n")
    assert done.err.startswith("8 tokens (length); loaded in ") and "tokens/s" in done.err


def test_run_as_json(world: World, ingot: Command) -> None:
    asked = ("run", world.artifact, "héllo", "--max-tokens", 6, "--ignore-eos", "--json")
    done = ingot(*asked)
    answer = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert list(answer) == [
        "prompt",
        "prompt_token_ids",
        "token_ids",
        "text",
        "finish_reason",
        "stop_reason",
        "timings",
    ]
    assert answer["prompt"] == "héllo" and len(answer["prompt_token_ids"]) == 6  # a token a byte
    assert len(answer["token_ids"]) == 6 and answer["finish_reason"] == "length"
    assert isinstance(answer["text"], str)
    assert list(answer["timings"]) == ["load_s", "first_token_s", "tokens_per_s"]
    assert all(value > 0 for value in answer["timings"].values())
    again = json.loads(ingot(*asked).out)
    assert again["token_ids"] == answer["token_ids"]
    by_ids = json.loads(
        ingot("run", world.artifact, "--prompt-ids", ",".join(map(str, answer["prompt_token_ids"])), *asked[3:]).out
    )
    assert by_ids["token_ids"] == answer["token_ids"] and by_ids["prompt"] is None


def test_run_tells_the_phases_of_its_start(world: World, ingot: Command) -> None:
    asked = ("run", world.artifact, "a", "--max-tokens", 1, "--timings")
    phases = json.loads(ingot(*asked, "--json").out)["phases_s"]
    assert next(iter(phases)) == "import" and list(phases)[-1] == "ready"
    assert {"target", "manifest", "plan", "weights", "executables", "states", "bind", "tokenizer"} <= phases.keys()
    assert 0 < phases["import"] < phases["ready"] and all(seconds >= 0 for seconds in phases.values())
    told = ingot(*asked).err.splitlines()
    assert told[0].startswith("1 tokens") and sorted(line.split()[0] for line in told[1:]) == sorted(phases)


def test_run_a_chat(world: World, ingot: Command) -> None:
    asked = ("run", world.artifact, "hé<end>", "--chat", "--system", "be brief", "--max-tokens", 6, "--ignore-eos")
    answer = json.loads(ingot(*asked, "--json").out)
    assert answer["prompt"] == "system: be brief<end>\nuser: hé<end><end>\n> "
    assert answer["prompt_token_ids"].count(256) == 2  # the template's, not the user's
    assert len(answer["prompt_token_ids"]) == len(answer["prompt"].encode()) - 2 * (len(END) - 1)
    done = ingot(*asked)
    assert (done.code, done.out) == (0, answer["text"] + "\n")
    assert json.loads(ingot("run", world.artifact, "a", "--chat", "--json").out)["prompt"] == "user: a<end>\n> "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--system", "b"], "--system without --chat"),
        (["--prompt-ids", "1", "--chat"], "--chat with --prompt-ids"),
    ],
)
def test_run_refuses_half_a_chat(world: World, ingot: Command, arguments: list[str], said: str) -> None:
    done = ingot("run", world.artifact, *arguments)
    assert (done.code, done.out) == (cli.BAD_INPUT, "") and said in done.err


def test_run_draws_by_seed(world: World, ingot: Command) -> None:
    def drawn(seed: int) -> Any:
        asked = ("--temperature", 1.5, "--top-k", 200, "--seed", seed, "--max-tokens", 12, "--ignore-eos", "--json")
        return json.loads(ingot("run", world.artifact, "abc", *asked).out)["token_ids"]

    assert drawn(1) == drawn(1) != drawn(2)


def test_run_without_a_tokenizer(world: World, ingot: Command) -> None:
    done = ingot("run", world.wordless, "--prompt-ids", "5, 6,7", "--max-tokens", 3, "--ignore-eos")
    assert done.code == 0
    assert done.out.startswith("5 6 7 ") and len(done.out.split()) == 6
    answer = json.loads(ingot("run", world.wordless, "--prompt-ids", "5,6,7", "--max-tokens", 1, "--json").out)
    assert answer["text"] is None and answer["timings"]["tokens_per_s"] is None


def test_run_with_one_token_of_output_and_a_stop_string(world: World, ingot: Command) -> None:
    text = json.loads(ingot("run", world.artifact, "a", "--max-tokens", 20, "--ignore-eos", "--json").out)["text"]
    stop = next(char for char in text if char.isascii())
    answer = json.loads(
        ingot("run", world.artifact, "a", "--max-tokens", 20, "--ignore-eos", "--stop", stop, "--json").out
    )
    assert answer["finish_reason"] == "stop" and answer["stop_reason"] == stop
    assert answer["text"] == text[: text.index(stop)]


def test_run_passes_on_why_a_checkpoint_does_not_compile(world: World, ingot: Command, tmp_path: Path) -> None:
    unknown = write_checkpoint(tmp_path / "unknown", architectures=["Qwen3NextForCausalLM"])
    done = ingot("run", unknown, "a")
    assert (done.code, done.out) == (cli.BAD_INPUT, "")
    assert "Qwen3NextForCausalLM" in done.err and "the nearest supported one is 'Qwen3ForCausalLM'" in done.err
    assert "Traceback" not in done.err
