"""Print each step of one request through Ingot, for docs/life-of-a-token.md.

Run from the repository's root: python docs/examples/life_of_a_token.py
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot import SamplingParams, compile_model
from ingot.runtime.engines.engine import Engine
from ingot.runtime.loading.loader import Loaded, load_artifact
from ingot.runtime.pages.sequence_pages import pools_of
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.scheduler_config import SchedulerConfig
from ingot.runtime.steps.step import StepInputs

CHECKPOINT = Path(__file__).parents[2] / "models" / "pico"
# Each token after it is twice as likely as the next best, so rounding on other machines changes none.
PROMPT = "def __init__(self,"
WIDTH = 140  # of a shown line
SHOWN_INPUTS = ("tokens", "q_lens", "rows", "starts", "page_table", "logit_rows", "temperature")


def heading(name: str) -> None:
    print(f"\n== {name} ==")


def excerpt(text: str, wanted: Iterable[str]) -> None:
    """Print the first line that contains each of `wanted`, without its origin; dots for omitted lines."""
    lines, last = text.splitlines(), -1
    for index in sorted(next(i for i, line in enumerate(lines) if part in line) for part in wanted):
        if index > last + 1:
            print("…")
        line = lines[index].partition("  #")[0]
        print(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")
        last = index
    if last + 1 < len(lines):
        print("…")


def compiling(artifact: Path) -> None:
    """Compile the model, and print the traced program, the passes and the plan."""
    compile_model(CHECKPOINT, artifact, backend="reference", max_seq_len=64, max_batch=2, max_tokens=16)
    heading("traced")
    excerpt(
        (artifact / "trace" / "00-traced.ir").read_text(encoding="utf-8"),
        ["program", "dim T", "input tokens", "param layers.0.attention.q.weight", "%embedding =", "%rms_norm =",
         "%linear =", "%attention =", "%linear_3 =", "%add =", "%select_rows", "return"],
    )  # fmt: skip
    heading("passes")
    for record in json.loads((artifact / "trace" / "passes.json").read_text(encoding="utf-8")):
        changes = record["op_count_diff"].items()
        change = ", ".join(f"{count:+} {name.removeprefix('ingot.')}" for name, count in changes)
        print(f"{record['stage']:8} {record['name']:20} {change}".rstrip())
    heading("final")
    excerpt(
        (artifact / "program.ir").read_text(encoding="utf-8"),
        ["program", "param layers.0.attention.q_k_v.weight", "state kv.0", "state position", "%feed =",
         "%embedding =", "%kv_append =", "%paged_attention =", "%add_rms_norm =", "%sample =", "%advance ="],
    )  # fmt: skip
    heading("plan")
    plan = json.loads((artifact / "plan.json").read_text(encoding="utf-8"))["positions"]["all"]["plans"]["main"]
    instructions = plan["buckets"][0]["instructions"]
    for index in (0, 1, 2, len(instructions) - 2, len(instructions) - 1):
        print(f"{index:3} {shown(instructions[index])}")


def shown(instruction: dict[str, Any]) -> str:
    """Return an instruction on one line: its results and updates, its call, the values freed after it."""
    results = [*(name or "-" for name in instruction["results"]), *(f"{name}!" for name in instruction["updates"])]
    text = f"{', '.join(results)} = {instruction['target']}({len(instruction['args'])} arguments)"
    return text + (f"   frees {', '.join(instruction['frees'])}" if instruction["frees"] else "")


class Watched:
    """An executor that prints its inputs, and the device rows after the step."""

    def __init__(self, loaded: Loaded, titles: list[str]) -> None:
        self.executor, self.titles, self.launched = loaded.executor, titles, 0

    def launch(self, inputs: StepInputs) -> Any:
        self.launched += 1
        title = self.titles.pop(0) if self.titles else ""
        if title:
            heading(title)
            for name in SHOWN_INPUTS:
                print(f"{name:12} {inputs[name].tolist()}")
        handle = self.executor.launch(inputs)
        if title:
            row = int(inputs["rows"][0])
            states = {name: int(self.executor.states[name][row]) for name in ("last_token", "position")}
            print(f"row {row} after  {', '.join(f'{name} {value}' for name, value in states.items())}")
        return handle


def serving(artifact: Path) -> None:
    """Load the artifact, and print one prefill step, decode steps and text."""
    loaded = load_artifact(artifact)
    heading("loaded")
    executor = loaded.executor
    print(f"params  {len(executor.plan.params)}, mapped from {len(loaded.artifact.weight_files())} file")
    for name in ("kv.0", "last_token", "position"):
        print(f"state   {name} {executor.plan.states[name].type} -> {list(executor.states[name].shape)}")
    limits = loaded.limits
    config = SchedulerConfig(limits.max_batch, limits.max_tokens, limits.max_seq_len, limits.page_size)
    watched = Watched(loaded, ["prefill", "decode"])
    engine = Engine(
        watched,
        Scheduler(config, pools_of(loaded.pages, limits.page_size, loaded.scratch_pages)),
        loaded.tokenizer,
        vocab_size=limits.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
    )
    engine.add_request("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=5))
    told: list[str] = []
    while engine.has_unfinished():
        before = watched.launched
        outputs = engine.step()
        launched = f"step {before} launched" if watched.launched > before else "nothing to launch"
        text = f"; of step {before - 1}: {outputs[0].outputs[0].text!r}" if outputs else ""
        told.append(launched + text)
    heading("text")
    print("\n".join(told))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compiling(Path(folder) / "pico.ingot")
        serving(Path(folder) / "pico.ingot")
