"""`LLM`, `compile-model` and `ingot why-miss` take the names of checkpoints on the hub."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from command_world import LIMITS, write_checkpoint
from drawn import in_one_of
from hub_server import Client, Hub

from ingot.compile.request import Request

pytestmark = pytest.mark.xdist_group("cli")

SERVE = """
import json, sys
from ingot import IngotError, LLM, SamplingParams
for model in sys.argv[2:]:
    try:
        llm = LLM(model, **json.loads(sys.argv[1]))
    except IngotError as error:
        print(json.dumps({"error": str(error)}))
    else:
        out = llm.generate("def ", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
        print(json.dumps({"path": str(llm.loaded.artifact.folder), "tokens": list(out.outputs[0].token_ids)}))
"""
INGOT = (sys.executable, "-m", "ingot")
OPTIONS = {"backend": "reference", "max_seq_len": 64, "max_batch": 4, "max_tokens": 64}


def served(client: Client, *models: str) -> tuple[list[dict[str, object]], str]:
    """What LLM(model, **OPTIONS) answers for each of `models`, in one process, and its stderr."""
    done = client.run(sys.executable, "-c", SERVE, json.dumps(OPTIONS), *models)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path) -> Path:
    """The folder that the repository org/tiny was made of."""
    folder = write_checkpoint(tmp_path / "origin")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a checkpoint was run')")
    hub.add("org/tiny", folder)
    return folder


@in_one_of(3)
def test_llm_downloads_and_compiles_once(hub: Hub, client: Client, tiny: Path) -> None:
    (first,), said = served(client, "org/tiny")
    assert "modeling_tiny.py" not in hub.fetched() and "model.safetensors" in hub.fetched()
    lines = said.splitlines()
    assert lines[0] == "ingot: look for org/tiny on the hub"
    assert sum("download" in line for line in lines) == 1  # quiet: it is no terminal
    assert "ingot: passes and executables" in lines

    # At a port that nothing listens on.
    again, said = served(Client(client.folder, "http://127.0.0.1:1"), "org/tiny")
    assert again == [first]
    assert "from the hub's cache: the hub cannot be queried" in said
    assert "passes and executables" not in said

    # The same files in a folder are the same request, whose artifact would be taken.
    artifact = Path(str(first["path"]))
    request = Request.read(tiny, **OPTIONS)  # type: ignore[arg-type]
    assert artifact.stem == request.key(request.trace())

    commit = hub.repositories["org/tiny"].revisions["main"]
    timings = json.loads((artifact / "timings.json").read_text())
    assert timings["hub"] == f"org/tiny@{commit}"
    assert timings["checkpoint"].endswith(f"/snapshots/{commit}")


REFUSED = """
import json, sys
from ingot import LLM
from ingot.ir.errors import IngotError
from ingot.compile.request import Request
for model, options in json.loads(sys.argv[1]):
    try:
        LLM(model) if options is None else Request.read(model, **options)
    except IngotError as error:
        print(json.dumps(str(error)))
"""


@in_one_of(3)
def test_what_cannot_be_compiled_is_refused_before_a_weight_is_downloaded(hub: Hub, client: Client, tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    for name, changes in (
        ("org/odd", {"architectures": ["LlamaForCausalLLM"]}),
        ("org/vptq", {"quantization_config": {"quant_method": "vptq"}}),
    ):
        changed = json.dumps({**config, **changes}).encode()
        hub.add(name, {"config.json": changed, "model.safetensors": b"w" * 1000})
    cases: dict[tuple[str, ...], tuple[str, dict[str, object] | None]] = {
        ("no folder 'org/none'", "no repository 'org/none' on the hub"): ("org/none", None),
        ("no folder 'org/tiny/'", "without the slash"): ("org/tiny/", None),
        ("none is not there", "a hub repository, as in org/name"): ("none", None),
        ("'LlamaForCausalLLM' is not supported",): ("org/odd", {}),
        ("quantized by 'vptq'",): ("org/vptq", {}),
        ("max_seq_len is 1048576",): ("org/tiny", {"max_seq_len": 1 << 20}),
        ("the checkpoint 'draft' is not needed",): ("org/tiny", {"checkpoints": {"draft": "org/odd"}}),
        ("has no revision 'v9'",): ("org/tiny", {"revision": "v9"}),
        ("a folder has none",): (str(tiny), {"revision": "main"}),
        ("unknown dtype",): ("org/absent", {"dtype": "float8"}),
    }
    done = client.run(sys.executable, "-c", REFUSED, json.dumps(list(cases.values())))
    for words, message in zip(cases, done.stdout.splitlines(), strict=True):
        assert all(word in message for word in words), (words, message, done.stderr)
    assert set(hub.fetched()) == {"config.json"} and "LIST org/absent" not in hub.asked


AGAIN = """
import json, sys
import ingot, ingot.cli.main as cli
from ingot.compile.recorded_request import recorded_request
request = recorded_request(ingot.open_artifact("a.ingot"))
print(request.origin, request.key(request.trace()), flush=True)
for command in json.loads(sys.argv[1]):
    print(cli.run(cli.INGOT, command), flush=True)
"""


@in_one_of(3)
def test_compile_model_records_the_commit_and_finds_it_again(hub: Hub, client: Client, tiny: Path) -> None:
    commit = hub.repositories["org/tiny"].commit({one.name: one.read_bytes() for one in tiny.iterdir()}, "v1")
    limits = ["--backend", "reference", *LIMITS]
    done = client.run(*INGOT, "compile", "org/tiny", "--revision", "v1", "-o", "a.ingot", *limits)
    assert done.returncode == 0, done.stderr
    assert f"org/tiny@{commit}" in done.stdout
    assert done.stderr.splitlines()[:3] == [
        "ingot: start",
        "ingot: look for org/tiny@v1 on the hub",
        next(line for line in done.stderr.splitlines() if line.startswith("ingot: download ")),
    ]
    assert re.search(rf"\ncheckpoint +org/tiny@{commit}\n", client.run(*INGOT, "inspect", "a.ingot").stdout)
    # The cache of the hub is gone, and the branch with it: the commit is found again.
    shutil.rmtree(client.cache)
    del hub.repositories["org/tiny"].revisions["v1"]
    commands = [["why-miss", "a.ingot", "org/tiny", *limits], ["compile", "org/none", "-o", "b.ingot", *limits]]
    again = client.run(sys.executable, "-c", AGAIN, json.dumps(commands))
    assert again.returncode == 0, again.stderr
    key = json.loads((client.folder / "a.ingot" / "manifest.json").read_text())["request_key"]
    assert again.stdout.splitlines() == [f"org/tiny@{commit} {key}", f"same request_key {key}", "0", "2"]
    assert "error: there is no folder 'org/none'" in again.stderr
    assert not (client.folder / "b.ingot").exists()


def test_an_interrupt_ends_a_download_at_once(hub: Hub, client: Client, tiny: Path) -> None:
    weights = {"model.safetensors": b"w" * 4_000_000}
    hub.add("org/tiny", {"config.json": (tiny / "config.json").read_bytes(), **weights}).stalled |= weights.keys()
    command = [*INGOT, "compile", "org/tiny", "-o", "a.ingot", "--backend", "reference"]
    with client.start(*command) as child:
        deadline = time.monotonic() + 60
        while "GET model.safetensors" not in hub.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
        took = time.monotonic() - begin
    assert child.returncode == 130 and err.endswith("error: interrupted\n")
    assert took < 9  # the download waits for 10 s
    assert [one.name for one in client.folder.iterdir() if "ingot" in one.name] == []
