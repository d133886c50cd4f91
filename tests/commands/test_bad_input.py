"""Bad input ends in a message that says what is wrong, and leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_world import CONFIG, Command, World

import ingot.cli.main as cli

pytestmark = pytest.mark.xdist_group("cli")


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@dataclass(frozen=True)
class Bad:
    """A command line with `{…}` for the test's paths, and words that its message must hold."""

    name: str
    line: str
    words: tuple[str, ...]


BAD_COMPILES = (
    Bad("no checkpoint", "{none} -o {out}", ("none",)),
    Bad("a file for a checkpoint", "{file} -o {out}", ("file",)),
    Bad("a folder without a config", "{empty} -o {out}", ("config.json",)),
    Bad("a config that is no JSON", "{broken} -o {out}", ("config.json", "JSON")),
    Bad("an unknown architecture", "{unknown} -o {out}", ("LlamaForCausalLLM", "nearest", "'LlamaForCausalLM'")),
    Bad("an unknown pass", "{tiny} -o {out} --passes default,-merge-linear", ("merge-linear", "nearest")),
    Bad("a pass that is needed", "{tiny} -o {out} --passes default,-make-plan", ("make-plan", "cannot be left out")),
    Bad("an unknown pass option", "{tiny} -o {out} --passes default,normalize{{deep=1}}", ("normalize", "deep")),
    Bad("a bad option value", "{tiny} -o {out} --passes default,insert-paged-kv{{page_size=x}}", ("page_size", "'x'")),
    Bad("an open brace", "{tiny} -o {out} --passes default,normalize{{", ("open brace",)),
    Bad("no default", "{tiny} -o {out} --passes=-normalize", ("default,-name",)),
    Bad("an unknown target", "{tiny} -o {out} --target tpu", ("tpu", "cpu", "sm_90")),
    Bad(
        "a backend for others", "{tiny} -o {out} --target cpu --backend triton", ("'triton'", "target cpu", "inductor")
    ),
    Bad("too long a sequence", "{tiny} -o {out} --max-seq-len 129", ("max_seq_len is 129", "1 to 128")),
    Bad("an empty sequence", "{tiny} -o {out} --max-seq-len 0", ("max_seq_len is 0",)),
    Bad("no batch", "{tiny} -o {out} --max-batch 0", ("max_batch is 0",)),
    Bad("a negative batch", "{tiny} -o {out} --max-batch -3", ("max_batch is -3",)),
    Bad("fewer tokens than sequences", "{tiny} -o {out} --max-tokens 8 --max-batch 9", ("max_tokens 8", "max_batch 9")),
    Bad("no jobs", "{tiny} -o {out} -j 0", ("jobs is 0",)),
    Bad("an output that exists", "{tiny} -o {artifact}", ("exists already",)),
    Bad("an output without a folder", "{tiny} -o {none}/a.ingot", ("no folder",)),
    Bad("an output under a file", "{tiny} -o {file}/a.ingot", ("folder",)),
    Bad("an output that cannot be written", "{tiny} -o /proc/a.ingot", ("/proc/a.ingot", "written")),
)

BAD_RUNS = (
    Bad("no artifact", "{none} a", ("none is not there", "compile-model")),
    Bad("a file for an artifact", "{file} a", ("not a folder",)),
    Bad("a folder that is no artifact", "{empty} a", ("no artifact", "manifest.json")),
    Bad("no prompt", "{artifact}", ("no prompt",)),
    Bad("two prompts", "{artifact} a --prompt-ids 1", ("--prompt-ids",)),
    Bad("text without a tokenizer", "{wordless} a", ("without a tokenizer",)),
    Bad("a stop string without a tokenizer", "{wordless} --prompt-ids 1 --stop a", ("stop strings",)),
    Bad("ids that are none", "{wordless} --prompt-ids 1,b", ("'b'", "--prompt-ids")),
    Bad("an empty id", "{wordless} --prompt-ids 1,,2", ("--prompt-ids",)),
    Bad("a negative id", "{wordless} --prompt-ids=-1", ("'-1'",)),
    Bad("an id out of range", "{wordless} --prompt-ids 1,260", ("260", "prompt_token_ids[1]", "[0, 259]")),
    Bad("a huge id", "{wordless} --prompt-ids 9999999999", ("9999999999",)),
    Bad("too long a prompt", "{wordless} --prompt-ids " + ",".join("1" * 65), ("65", "63")),
    Bad("a negative temperature", "{artifact} a --temperature -1", ("temperature", ">= 0")),
    Bad("no temperature", "{artifact} a --temperature nan", ("temperature",)),
    Bad("an infinite temperature", "{artifact} a --temperature inf", ("temperature",)),
    Bad("a top-p of 0", "{artifact} a --top-p 0", ("top_p",)),
    Bad("a negative top-k", "{artifact} a --top-k -2", ("top_k",)),
    Bad("a min-p over 1", "{artifact} a --min-p 1.5", ("min_p",)),
    Bad("a negative seed", "{artifact} a --seed -7", ("seed",)),
    Bad("no tokens", "{artifact} a --max-tokens 0", ("max_tokens",)),
)

BAD_LOOKS = (
    Bad("no artifact", "{none}", ("not there",)),
    Bad("a checkpoint", "{tiny}", ("no artifact",)),
    Bad("an unknown stage", "{artifact} --stage FUSE", ("FUSE", "FUSED")),
    Bad("a stage that no pass leads to", "{artifact} --stage SHARDED", ("SHARDED", "CACHED")),
    Bad("an unknown pass", "{artifact} --pass merge-linear", ("nearest is 'merge-linears'",)),
    Bad("two views", "{artifact} --plan --weights", ("--plan and --weights",)),
)


def check_bad(command: str, bad: Bad, world: World, ingot: Command, tmp_path: Path) -> None:
    places = {
        "out": tmp_path / "out.ingot",
        "none": tmp_path / "none",
        "file": tmp_path / "file",
        "empty": tmp_path / "empty",
        "broken": tmp_path / "broken",
        "unknown": tmp_path / "unknown",
        "tiny": world.checkpoint,
        "artifact": world.artifact,
        "wordless": world.wordless,
    }
    places["file"].write_text("text")
    for name, config in (
        ("empty", None),
        ("broken", "{oh"),
        ("unknown", json.dumps({**CONFIG, "architectures": ["LlamaForCausalLLM"]})),
    ):
        places[name].mkdir()
        if config is not None:
            (places[name] / "config.json").write_text(config)
            (places[name] / "model.safetensors").write_bytes((world.checkpoint / "model.safetensors").read_bytes())
    before = snapshot(tmp_path), snapshot(world.artifact.parent)
    done = ingot(command, *(part.format(**places) for part in bad.line.split()))
    assert done.code == cli.BAD_INPUT, done.err
    assert done.out == ""
    assert "error: " in done.err and "Traceback" not in done.err
    for word in bad.words:
        assert word in done.err
    assert (snapshot(tmp_path), snapshot(world.artifact.parent)) == before, "something was left behind"


@pytest.mark.parametrize("bad", BAD_COMPILES, ids=lambda bad: bad.name)
def test_a_bad_compile_is_refused(bad: Bad, world: World, ingot: Command, tmp_path: Path) -> None:
    check_bad("compile", bad, world, ingot, tmp_path)


@pytest.mark.parametrize("bad", BAD_RUNS, ids=lambda bad: bad.name)
def test_a_bad_run_is_refused(bad: Bad, world: World, ingot: Command, tmp_path: Path) -> None:
    check_bad("run", bad, world, ingot, tmp_path)


@pytest.mark.parametrize("bad", BAD_LOOKS, ids=lambda bad: bad.name)
def test_a_bad_look_is_refused(bad: Bad, world: World, ingot: Command, tmp_path: Path) -> None:
    check_bad("inspect", bad, world, ingot, tmp_path)


def test_text_that_is_no_unicode_is_refused(world: World, ingot: Command) -> None:
    done = ingot("run", world.artifact, "a\udcff")  # how Python reads the byte ff of a command line
    assert done.code == cli.BAD_INPUT and "Unicode" in done.err


def test_an_empty_prompt_is_refused(world: World, ingot: Command) -> None:
    done = ingot("run", world.artifact, "")
    assert (done.code, done.out) == (cli.BAD_INPUT, "") and "empty" in done.err


def test_a_damaged_artifact_is_refused(world: World, ingot: Command, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy.ingot"
    shutil.copytree(world.artifact, copy)
    data = bytearray((copy / "plan.json").read_bytes())
    data[100] ^= 1
    (copy / "plan.json").write_bytes(data)
    for command in ("inspect", "run"):
        done = ingot(command, copy, *(["a"] if command == "run" else []))
        assert done.code == cli.BAD_INPUT and "plan.json" in done.err and "damaged" in done.err
