"""The commands: what they print, how they end, and that bad input leaves nothing behind."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ingot.cli as cli
from ingot.ir.errors import InternalError, PassError
from ingot.ir.plan import Plans

pytestmark = pytest.mark.xdist_group("cli")

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, POSITIONS = 260, 32, 2, 4, 2, 16, 48, 128
END = "<end>"
# One turn a line, each closed by the end token.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


def write_checkpoint(folder: Path, *, tokenizer: bool = True, **changes: object) -> Path:
    """A tiny random Qwen3 checkpoint; with `tokenizer`, one token a byte."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.self_attn.q_norm.weight": torch.ones(HEAD_DIM),
            f"{layer}.self_attn.k_norm.weight": torch.ones(HEAD_DIM),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(FFN, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    save_file(tensors, folder / "model.safetensors")
    if tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(END, special=True)])
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return folder


@dataclass(frozen=True)
class Done:
    """How a command line ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def ingot(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `ingot` with arguments in this process, which has torch already."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = cli.run(cli.INGOT, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@dataclass(frozen=True)
class World:
    """What the module shares: checkpoints, artifacts, and how compiling the first ended."""

    checkpoint: Path
    artifact: Path
    compiled: Done
    wordless: Path


def in_process(*command: object, cwd: Path | None = None) -> Done:
    """A command line in a process of its own."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=240)
    return Done(done.returncode, done.stdout, done.stderr)


LIMITS = ("--max-batch", "4", "--max-tokens", "32", "--max-seq-len", "64", "-j", "1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_CACHE", str(folder / "cache"))
        checkpoint = write_checkpoint(folder / "tiny model")
        bare = write_checkpoint(folder / "bare", tokenizer=False)
        artifact, wordless = folder / "tiny model.ingot", folder / "wordless.ingot"
        compile_model = Path(sys.executable).with_name("compile-model")
        compiled = in_process(compile_model, checkpoint, "-o", artifact, "--backend", "reference", *LIMITS)
        assert compiled.code == 0, compiled.err
        assert (
            cli.run(cli.COMPILE_MODEL, [str(bare), "-o", str(wordless), "--backend", "reference", *LIMITS]) == cli.DONE
        )
        yield World(checkpoint, artifact, compiled, wordless)


# Help, and what a command line may be.

COMMANDS = ("compile", "run", "bisect", "diff", "explain", "inspect", "report", "target", "verify", "why-miss")

HELP = f"""
import contextlib, io, sys
import ingot.cli as cli
for app, arguments in [(cli.COMPILE_MODEL, ["--help"]), (cli.INGOT, ["--help"]), (cli.INGOT, ["--version"])] + [
    (cli.INGOT, [name, "--help"]) for name in {COMMANDS}
]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert cli.run(app, arguments) == 0
    assert text.getvalue().strip()
slow = "torch numpy pydantic tokenizers safetensors huggingface_hub jinja2 ingot.compiler ingot.llm".split()
print(*(name for name in slow if name in sys.modules))
"""


def test_help_imports_nothing_slow() -> None:
    done = in_process(sys.executable, "-c", HELP)
    assert done == Done(0, "\n", "")


def test_inspect_imports_neither_torch_nor_a_compiler(world: World) -> None:
    code = (
        "import sys, ingot.cli as cli\n"
        f"for part in ([], ['--plan'], ['--weights'], ['--stage', 'FUSED'], ['--json']):\n"
        f"    assert cli.run(cli.INGOT, ['inspect', {str(world.artifact)!r}, *part]) == 0\n"
        "print('torch' in sys.modules, 'ingot.compiler' in sys.modules, file=sys.stderr)"
    )
    done = in_process(sys.executable, "-c", code)
    assert (done.code, done.err) == (0, "False False\n")


def test_help_names_every_option(ingot: Command) -> None:
    text = ingot("compile", "--help").out
    for option in [
        "--output",
        "-o",
        "--target",
        "--backend",
        "--dtype",
        "--max-seq-len",
        "--max-batch",
        "--max-tokens",
        "--passes",
        "--deterministic",
        "--mesh",
        "--trace",
        "-j",
    ]:
        assert option in text
    assert "ingot COMMAND" in ingot().out  # no command at all asks for help


def test_the_readme_names_only_what_exists(ingot: Command) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    helps = "".join(ingot(name, "--help").out for name in COMMANDS) + ingot().out
    commands = set(re.findall(r"`ingot ([a-z-]+)", readme))
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme))
    assert commands == set(COMMANDS) and options
    assert [option for option in sorted(options) if not re.search(rf"{option}(?![\w-])", helps)] == []


def test_the_defaults_are_those_of_compile_model() -> None:
    from ingot.commands.compile import compile_checkpoint
    from ingot.compiler import compile_model

    ours = {name: one.default for name, one in inspect.signature(compile_checkpoint).parameters.items()}
    theirs = {name: one.default for name, one in inspect.signature(compile_model).parameters.items()}
    del theirs["progress"], theirs["on_pass"]
    assert ours == theirs


@pytest.mark.parametrize(
    ("arguments", "complaint", "usage"),
    [
        (["compil", "x"], "compil", "Usage: ingot COMMAND"),
        (["--compile"], "--compile", "Usage: ingot COMMAND"),
        (["run"], "ARTIFACT", "Usage: ingot run"),
        (["run", "x", "y", "z"], "z", "Usage: ingot run"),
        (["run", "x", "- list"], "behind '--'", "Usage: ingot run"),
        (["run", "x", "y", "--max-tokens", "many"], "many", "Usage: ingot run"),
        (["inspect", "x", "--plans"], "--plan", "Usage: ingot inspect"),
        (["diff", "x"], "AFTER", "Usage: ingot diff"),
        (["target", "cpu"], "cpu", "Usage: ingot target"),
        (["compile", "x"], "--output", "Usage: ingot compile"),
        (["compile", "x", "-o", "y", "--backend", "tpu"], "inductor", "Usage: ingot compile"),
        (["compile", "x", "-o", "y", "--dtype", "int8"], "bfloat16", "Usage: ingot compile"),
        (["compile", "x", "-o", "y", "--no-deterministic"], "--no-deterministic", "Usage: ingot compile"),
    ],
)
def test_a_wrong_command_line_ends_with_usage(ingot: Command, arguments: list[str], complaint: str, usage: str) -> None:
    done = ingot(*arguments)
    assert (done.code, done.out) == (cli.BAD_INPUT, "")
    assert done.err.startswith("error: ") and complaint in done.err and usage in done.err


# Compiling.


def test_an_artifact_for_a_mesh_is_inspected_and_not_run(world: World, ingot: Command, tmp_path: Path) -> None:
    path = tmp_path / "two.ingot"
    compiled = ingot("compile", world.checkpoint, "-o", path, "--backend", "reference", "--mesh", "tp=2", *LIMITS)
    assert compiled.code == cli.DONE and compiled.out.endswith(f"\nNext:  ingot inspect {path}\n")
    weights = ingot("inspect", path, "--weights").out
    assert "weights/rank0/00000.safetensors@" in weights and "weights/rank1/00000.safetensors@" in weights
    assert "mesh tp=2" in ingot("inspect", path).out
    done = ingot("run", path, "--prompt-ids", "5")
    assert done.code == cli.BAD_INPUT and "serving on more than one device is not supported yet" in done.err
    for mesh, problem in (("tp=3", "do not divide among 3 ranks"), ("tp", "like tp=2"), ("pp=2", "unknown mesh axis")):
        refused = ingot("compile", world.checkpoint, "-o", tmp_path / "no", "--backend", "reference", "--mesh", mesh)
        assert refused.code == cli.BAD_INPUT and problem in refused.err


def test_compiling_tells_its_progress_and_reports(world: World) -> None:
    assert world.compiled.err.splitlines() == [
        f"ingot: {phase}"
        for phase in ("start", "trace", "identify", "passes and executables", "weights", "write", "golden run")
    ]
    report = world.compiled.out
    assert report.startswith(f"\nCompiled {world.artifact} in ")
    for line in (
        "trace",
        "weights",
        "write",
        "regions",
        "nodes per provider  reference ",
        "artifact",
        "build id",
        "Memory",
    ):
        assert f"\n{line}" in report
    assert "0 calls of 0 distinct executables" in report
    assert f"Next:  ingot run '{world.artifact}' \"…\"" in report


def test_without_a_tokenizer_the_report_suggests_token_ids(
    world: World, ingot: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ingot.compiler as compiler

    def compiled(checkpoint: str, output: str, **_: object) -> compiler.CompileReport:
        plans = Plans.model_validate_json((world.artifact / "plan.json").read_text())
        return compiler.CompileReport(Path(output), "b", "r", {"trace": 1.0}, 6, 2, 1, {"inductor": 6}, 7, 1500, plans)

    monkeypatch.setattr(compiler, "compile_model", compiled)
    done = ingot("compile", world.checkpoint, "-o", tmp_path / "a.ingot")
    assert done.code == 0
    assert "6 calls of 2 distinct executables, 1 from the cache" in done.out and "1.5 kB" in done.out
    assert f"Next:  ingot run {tmp_path}/a.ingot --prompt-ids 1,2,3" in done.out


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ingot.progress import live_progress

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with live_progress() as progress:
        progress("trace", 0, 0)
        for done in range(4):
            progress("weights", done, 3)
    drawn = capsys.readouterr()
    assert "trace" in drawn.err and "3/3" in drawn.err and drawn.err.count("✓") >= 2
    assert drawn.out == ""


def test_progress_in_a_log_is_sparse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import ingot.progress as module

    now = iter([0.0, 1.0, 7.0, 8.0, 13.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with module.live_progress() as progress:
        for done in range(5):
            progress("weights", done, 900)
    assert capsys.readouterr().err.splitlines() == [
        "ingot: weights",
        "ingot: weights, 2 of 900",
        "ingot: weights, 4 of 900",
    ]


# Running.


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
    unknown = write_checkpoint(tmp_path / "unknown", architectures=["Qwen3MoeForCausalLM"])
    done = ingot("run", unknown, "a")
    assert (done.code, done.out) == (cli.BAD_INPUT, "")
    assert "Qwen3MoeForCausalLM" in done.err and "the nearest supported one is 'Qwen3ForCausalLM'" in done.err
    assert "Traceback" not in done.err


# Looking.


def test_inspect_summary(world: World, ingot: Command) -> None:
    done = ingot("inspect", world.artifact)
    assert (done.code, done.err) == (0, "")
    for text in ("Qwen3ForCausalLM (qwen3), f32", "max_seq_len 64, max_batch 4, max_tokens 32", "merge-linears", "any"):
        assert text in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())
    assert "seconds  process at most\n" in done.out, "resident memory is the process's, and no pass's own"
    answer = json.loads(ingot("inspect", world.artifact, "--json").out)
    assert answer["identities"]["build_id"] in done.out and answer["identities"]["build_id"] in world.compiled.out
    assert list(answer) == [
        "path",
        "name",
        "schema_version",
        "model",
        "target",
        "versions",
        "tokenizer",
        "identities",
        "buckets",
        "executables",
        "nodes_per_provider",
        "bytes",
        "passes",
    ]
    assert answer["tokenizer"] is True
    assert answer["bytes"]["total"] == sum(file.stat().st_size for file in world.artifact.rglob("*") if file.is_file())
    assert sum(answer["nodes_per_provider"].values()) == sum(one["instructions"] for one in answer["buckets"])
    assert all(one["seconds"] is not None for one in answer["passes"])


def test_inspect_stages_and_passes(world: World, ingot: Command) -> None:
    from ingot.ir.parse import parse_program
    from ingot.ir.program import Stage

    passes = json.loads(ingot("inspect", world.artifact, "--json").out)["passes"]
    for name in dict.fromkeys(["TRACED", *(one["stage"] for one in passes)]):
        assert parse_program(ingot("inspect", world.artifact, "--stage", name.lower()).out).stage is Stage[name]
    for one in passes:
        as_json = json.loads(ingot("inspect", world.artifact, "--pass", one["name"], "--json").out)
        runs = [run for run in passes if run["name"] == one["name"]]
        assert list(as_json) == [run["bucket"] or (run["stage"] if len(runs) > 1 else "") for run in runs]
        for run, text in zip(runs, as_json.values(), strict=True):
            assert parse_program(text).stage <= Stage[run["stage"]]
        assert ingot("inspect", world.artifact, "--pass", one["name"]).out == "".join(as_json.values())
    assert "ingot.add_rms_norm" in ingot("inspect", world.artifact, "--pass", "fuse-add-rms-norm").out


def test_inspect_plan_and_weights(world: World, ingot: Command) -> None:
    plan = ingot("inspect", world.artifact, "--plan").out.splitlines()
    assert plan[0].split() == ["bucket", "#", "target", "provider", "arguments", "results", "frees"]
    assert plan[1].split()[:4] == ["any", "0", "ingot.feed", "reference"]
    assert any("kv.0!" in line for line in plan)
    stored = json.loads((world.artifact / "plan.json").read_text())
    assert json.loads(ingot("inspect", world.artifact, "--plan", "--json").out) == stored
    weights = ingot("inspect", world.artifact, "--weights").out
    assert "layers.0.mlp.gate_up.weight" in weights and "weights/00000.safetensors@" in weights and "concat(" in weights
    stored = json.loads((world.artifact / "weights.json").read_text())
    assert json.loads(ingot("inspect", world.artifact, "--weights", "--json").out) == stored


def test_target(ingot: Command) -> None:
    from ingot.ir.ops import OPS

    answer = json.loads(ingot("target", "--target", "cpu", "--json").out)
    assert list(answer) == [
        "target",
        "runs_here",
        "missing_here",
        "no_gpu",
        "features",
        "tools",
        "cache",
        "unavailable",
        "ops",
    ]
    assert answer["runs_here"] and not answer["unavailable"]
    ops = {one["op"].removeprefix("ingot."): one for one in answer["ops"]}
    assert ops.keys() == OPS.keys()
    assert ops["linear"]["providers"] == {"1": "cpu", "512": "inductor"} and ops["linear"]["deterministic"] == "cpu"
    assert set(ops["sample"]["providers"].values()) == {"cpu"}
    assert set(ops["select_rows"]["providers"].values()) == {"reference"}
    assert any("outside regions (T=512)" in reason for reason in ops["sample"]["refusals"])
    text = ingot("target", "--target", "cpu").out
    assert "ingot.paged_attention" in text and "outside regions" in text


# Bad input.


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
    Bad("fewer tokens than sequences", "{tiny} -o {out} --max-tokens 8", ("max_tokens 8", "max_batch 64")),
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


# How commands end.


def _caused() -> PassError:
    """A mistake in the code of one of Ingot's passes."""
    error = PassError("pass p: broke")
    error.__cause__ = LookupError("no node")
    return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InternalError("it broke", hint="nothing"), cli.OUR_FAULT, ("error: it broke", "please report it")),
        (
            _caused(),
            cli.OUR_FAULT,
            ("LookupError: no node", "error: pass p: broke", "please report it"),
        ),
        (ZeroDivisionError("one [over] zero"), cli.OUR_FAULT, ("Traceback", "[over]", "internal error", "report")),
        (KeyboardInterrupt(), cli.INTERRUPTED, ("interrupted",)),
    ],
)
def test_faults_of_our_own(
    ingot: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: tuple[str, ...]
) -> None:
    import ingot.ir.target as module

    def fail(device: str = "auto") -> None:
        raise error

    monkeypatch.setattr(module.Target, "detect", staticmethod(fail))
    done = ingot("target")
    assert (done.code, done.out) == (code, "")
    assert all(word in done.err for word in words)


def test_a_reader_that_goes_away_is_no_error(world: World) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ingot", "inspect", str(world.artifact), "--plan"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.NO_READER, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_stdout_is_told(world: World) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ingot", "inspect", str(world.artifact)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == cli.BAD_INPUT
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_a_stdout_without_unicode_still_works(world: World) -> None:
    command = [sys.executable, "-m", "ingot", "inspect", str(world.artifact)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and "\\u2013" in done.stdout
