"""Measure latent attention of prompts on this GPU: over latents, and with keys and values of each head.

    python benchmarks/kernels/latent_prompts.py [--heads 16] [--seconds 60] [--json FILE]

latents     attention over cached latents for all tokens, and the matmul of each head after it
expanded    keys and values of the step's own tokens by cuBLAS, attention over the latents of the tokens before the
            step, the matmul of each head after it, and attention over the step's keys and values (`expand-latents`)

Sizes are those of DeepSeek-V2-Lite (16 heads) and DeepSeek-V3 (128). A step has one sequence. Each CUDA graph holds a
few calls, and the graphs take turns. Both results are compared with attention in float32. Operations are those of keys
and values of each head, and of making them from latents.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import benchmarks_path  # noqa: F401
import torch
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, product_rate, take_turns, this_machine
from kernel_figures import Call, Peak, finish, measure_figures, slug
from results import add_json_option

from ingot.backends.triton.lower.call import Call as Lowered
from ingot.backends.triton.lower.table import LOWERINGS
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Launcher, Machine, captured
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

PAGE, CALLS = 16, 4
STEPS = {"4000 tokens": (4000, 0), "1000 tokens": (1000, 0), "2048 tokens after 4096": (2048, 4096)}


@dataclass(frozen=True)
class Case:
    """A step with `fed` tokens of one sequence, after `before` cached ones, of a model with these sizes of heads."""

    what: str
    heads: int
    fed: int
    before: int
    rank: int = 512
    inner: int = 128
    rotated: int = 64
    value: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return float((self.inner + self.rotated) ** -0.5)

    @property
    def call(self) -> Call:
        pairs = self.fed * self.before + self.fed * (self.fed + 1) // 2
        made = self.fed * self.rank * (self.inner + self.value)
        flop = 2 * self.heads * (pairs * (self.inner + self.rotated + self.value) + made)
        row, itemsize = self.rank + self.rotated, self.dtype.itemsize
        moved = (self.fed + self.before) * row + self.fed * self.heads * (self.inner + self.rotated + self.value)
        what = f"{self.heads} heads, {self.what}"
        return Call(slug(what), what, moved * itemsize, flop)


def launcher(machine: Machine, case: Case, op: str, tensors: dict[str, torch.Tensor], **options: object) -> Launcher:
    """Return a function that launches the kernels of an op on tensors of the shapes and strides of `tensors`."""
    bucket = BucketClass(name="measured", tokens=(65, max(8192, case.fed)))
    schedule = Schedule(machine.sm, machine.cores, bucket, sequences=1, dependent=machine.dependent)

    def typed(tensor: torch.Tensor) -> TensorType:
        shape: tuple[int | str, ...] = tuple(tensor.shape)
        if shape[0] == case.fed:
            shape = ("T", *shape[1:])
        return TensorType(tensor.dtype, shape, None if tensor.is_contiguous() else tensor.stride())

    types = {name: typed(tensor) for name, tensor in tensors.items()}
    values: dict[str, Value | None] = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    with torch.device("meta"):
        made = OPS[op].fake(*(tensor.to("meta") for tensor in tensors.values()), **options)
    results = tuple(map(typed, (made,) if isinstance(made, torch.Tensor) else made))
    defaults = {**OPS[op].bind(list(tensors.values()), dict(options))}
    attributes = {name: value for name, value in defaults.items() if name not in values}
    outputs = LOWERINGS[op](Lowered(op, {**dict.fromkeys(attributes), **values}, attributes, results), schedule)
    return Launcher(schedule, outputs[0], {"T": case.fed})


@dataclass(frozen=True)
class Inputs:
    """The tensors of a step by name, and the attention of each head in float32."""

    tensors: dict[str, torch.Tensor]
    expected: torch.Tensor


def inputs_of(case: Case) -> Inputs:
    g, total = torch.Generator(device.DEVICE).manual_seed(1), case.fed + case.before
    heads, rank, inner = case.heads, case.rank, case.inner

    def drawn(*shape: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g, device=device.DEVICE) * size).to(case.dtype)

    rows = drawn(total, rank + case.rotated)
    k_up, v_up = (drawn(heads, size, rank, size=rank**-0.5) for size in (inner, case.value))
    q = drawn(case.fed, heads, inner + case.rotated)
    absorbed = torch.einsum("thn,hnc->thc", q[..., :inner].float(), k_up.float()).to(case.dtype)
    pages = -(-total // PAGE)
    kv = torch.zeros(pages, 1, PAGE, 1, rows.shape[1], dtype=case.dtype, device=device.DEVICE)
    kv.view(-1, rows.shape[1])[:total] = rows
    ints = {"q_starts": 0, "q_lens": case.fed, "kv_lens": total}
    tensors = {name: torch.tensor([size], dtype=torch.int32, device=device.DEVICE) for name, size in ints.items()}
    tensors |= {
        "q": q[..., :inner], "q_rotated": q[..., inner:], "k_rotated": rows[case.before :, None, rank:], "kv": kv,
        "absorbed": torch.cat([absorbed, q[..., inner:]], -1), "latents": rows[case.before :, :rank].contiguous(),
        "k_up": k_up, "v_up": v_up,
        "page_table": torch.arange(pages, dtype=torch.int32, device=device.DEVICE)[None],
    }  # fmt: skip
    return Inputs(tensors, _expected(case, q, rows, k_up, v_up))


def _expected(case: Case, q: torch.Tensor, rows: torch.Tensor, k_up: torch.Tensor, v_up: torch.Tensor) -> torch.Tensor:
    """Return the attention [T, H, V] in float32, one head after the other."""
    latents, rotated = rows[:, : case.rank].float(), rows[:, case.rank :].float()
    seen = torch.ones(case.fed, len(rows), dtype=torch.bool, device=rows.device).tril(case.before)
    found = []
    for head in range(case.heads):
        keys = torch.cat([latents @ k_up[head].float().T, rotated], -1)
        scores = (q[:, head].float() @ keys.T * case.scale).masked_fill(~seen, float("-inf"))
        found.append(scores.softmax(-1) @ (latents @ v_up[head].float().T))
    return torch.stack(found, 1)


def over_latents(machine: Machine, case: Case, given: dict[str, torch.Tensor]) -> tuple[Callable[[], None], Launcher]:
    """Return a function that computes a step over latents, and the launcher that has its result."""
    named = {name: given[name] for name in ("kv", "page_table", "q_starts", "q_lens", "kv_lens")}
    first = {"q": given["absorbed"], **named}
    attention = launcher(machine, case, "paged_attention", first, scale=case.scale, value_width=case.rank)
    second = {"x": attention.output, "weight": given["v_up"]}
    after = launcher(machine, case, "head_linear", second)

    def run() -> None:
        attention(list(first.values()))
        after(list(second.values()))

    return run, after


def expanded(machine: Machine, case: Case, given: dict[str, torch.Tensor]) -> tuple[Callable[[], None], Launcher]:
    """Return a function that computes a step with keys and values of each head, and the launcher with its result."""
    named = {name: given[name] for name in ("kv", "page_table", "q_starts", "q_lens", "kv_lens")}
    first = {"q": given["absorbed"], **named}
    options = {"scale": case.scale, "value_width": case.rank, "mask": "bidirectional", "cached": True}
    before = launcher(machine, case, "partial_attention", first, **options)
    lse = before.buffers["output1"]
    second = {"x": before.output, "weight": given["v_up"]}
    after = launcher(machine, case, "head_linear", second)
    ups = [given[name].flatten(0, 1) for name in ("k_up", "v_up")]
    made = [given["latents"].new_empty(case.fed, len(up)) for up in ups]
    k, v = (one.view(case.fed, case.heads, -1) for one in made)
    third = {name: given[name] for name in ("q", "q_rotated")} | {"k": k, "k_rotated": given["k_rotated"], "v": v}
    third |= {**{name: given[name] for name in ("q_starts", "q_lens")}, "before": after.output, "before_lse": lse}
    attention = launcher(machine, case, "step_latent_attention", third, scale=case.scale)

    def run() -> None:
        for up, out in zip(ups, made, strict=True):
            torch.mm(given["latents"], up.T, out=out)
        before(list(first.values()))
        after(list(second.values()))
        attention(list(third.values()))

    return run, attention


def measure(machine: Machine, case: Case) -> dict[str, list[float]]:
    """Return the seconds of a step in each round of measurement, by form. Raises RuntimeError for wrong results."""
    inputs = inputs_of(case)
    recorded = {}
    for name, form in (("latents", over_latents), ("expanded", expanded)):
        run, result = form(machine, case, inputs.tensors)
        run()  # compiles the kernels, and sets cuBLAS up, outside the recording
        recorded[name] = check(Recorded(captured([run] * CALLS), CALLS, (inputs, run)), result.output, inputs.expected)
    return take_turns(recorded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, choices=(16, 128), help="only for this model; default: both")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds after which no call begins")
    add_json_option(parser)
    options = parser.parse_args()
    machine, peak = this_machine(), Peak(copy_bandwidth("cuda"), product_rate())
    cases = [
        Case(what, heads, *step)
        for heads in (16, 128)
        for what, step in STEPS.items()
        if options.heads in (None, heads)
    ]
    work = ((case.call, partial(measure, machine, case)) for case in cases)
    figures, missing = measure_figures("latent_prompts", work, peak, options.seconds, ours="expanded", peer="latents")
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
