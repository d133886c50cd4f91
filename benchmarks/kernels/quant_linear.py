"""Measure a decoder's matmuls with quantized weights on this GPU, by format and tokens of a step.

    python benchmarks/kernels/quant_linear.py [--shape 8b] [--formats fp8,int4_g128] [--tokens 1,32] [--sweep]

Ingot's kernels compute a matmul with the norm, gate or residual of its region, and with the launch that rounds or
reorders x if the format needs one. cuBLAS computes the matmul alone in bf16. A CUDA graph of each holds a sequence of
calls over random weights, different ones for each call: two GB of them, or 128 calls. The graphs take turns. The last
result is compared with the op's reference in float32. Bytes are those of the weight with its scales and zero points.

With --sweep, each matmul of up to 64 tokens is timed with several tile sizes first. The best ones are printed and used.
For one token, sweep_one_token.py does so with kernels that several processes compile.
With --one-token tile, a matmul of one token is computed by the kernel for several.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import benchmarks_path  # noqa: F401
import torch
import triton
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, product_rate, take_turns, this_machine
from kernel_figures import Call, Peak, finish, kernel_parser, measure_figures, slug
from linear_products import Decoder
from one_token_tiles import one_token_tiles

from ingot.backends.triton.lower.linear.call import Gate, Linear, Norm
from ingot.backends.triton.lower.linear.matmul import schedule_linear
from ingot.backends.triton.lower.linear.problem import LINEAR, LinearProblem
from ingot.backends.triton.lower.linear.tiles import Tiles
from ingot.backends.triton.lower.linear.weight import stored_weight
from ingot.backends.triton.lower.quant.tiles import QUANT_MATVEC, QuantMatvecTiles
from ingot.backends.triton.lower.sizes import padded_tokens
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune.device import DEVICE, Launcher, Machine, captured
from ingot.backends.triton.tune.linear import EPS, MOST_LAUNCHES, TRAFFIC
from ingot.ir import ops
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass
from ingot.ir.artifact.tuning import Choice
from ingot.ir.formats import PARTS, Format, find_format
from ingot.ir.types import DTYPES, TensorType

FORMATS = "fp8,fp8_per_channel_per_token,fp8_block128,f8e4m3/1x*:f32,int8,int8_w8a8,int4_g128,int4_g128_asym"
TOKENS = "1,8,16,32,64,512,2048"
# The tensors of a call: x, the parts of the weight or None for absent ones, the norm's weight, the residual.
Inputs = list[Any]
_BF16 = torch.bfloat16
_Tiles = Tiles | QuantMatvecTiles
_PARTS = {part: 1 + place for place, part in enumerate(PARTS)}  # places among the inputs
_GAIN, _RESIDUAL = len(PARTS) + 1, len(PARTS) + 2


@dataclass(frozen=True)
class Case:
    """A matmul with a weight in `format`, in steps of `tokens` tokens. `part` is its name in the decoder.

    With `by_tile`, a step of one token has the kernel for several.
    """

    part: str
    tokens: int
    format: Format
    problem: LinearProblem
    by_tile: bool = False

    @property
    def types(self) -> dict[str, TensorType]:
        """Return the types of the tensors that store the weight, by part name."""
        return self.format.types((self.problem.rows, self.problem.depth), _BF16)

    @property
    def call(self) -> Call:
        what = f"{self.format.name} {self.part}, {self.tokens} token{'s' * (self.tokens > 1)}"
        moved = sum(torch.Size(one.bind({})).numel() * one.dtype.itemsize for one in self.types.values())
        return Call(slug(what), what, moved, 2 * self.tokens * self.problem.rows * self.problem.depth)

    @property
    def calls(self) -> int:
        return min(MOST_LAUNCHES, max(4, TRAFFIC // self.call.bytes))


def cases(decoder: Decoder, formats: Sequence[str], tokens: Sequence[int], by_tile: bool = False) -> Iterator[Case]:
    for name, step in itertools.product(formats, tokens):
        for part, problem in decoder.parts(min(step, GPU_FEW_TOKENS)).items():
            if part != "head":  # it keeps its dtype
                yield Case(part, step, find_format(name), problem, by_tile and step == 1)


def schedule_of(machine: Machine, case: Case, tiles: _Tiles | None = None) -> tuple[Schedule, Value]:
    """Return the launches of a matmul with these tile sizes or those of a compile, and its result.

    A matmul of one token has the kernel for several if its case says so.
    """
    problem, few = case.problem, case.tokens <= GPU_FEW_TOKENS
    padded = 16 if case.by_tile else padded_tokens(case.tokens)
    least = {1: 1, 16: 2}.get(padded, padded // 2 + 1)
    bucket = BucketClass(name="measured", tokens=(least, padded) if few else (GPU_FEW_TOKENS + 1, 8192))
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    weight = stored_weight(case.format, {part: Value(one, input=_PARTS[part]) for part, one in case.types.items()})
    linear = Linear(
        Value(TensorType(_BF16, ("T", problem.depth)), input=0),
        weight,
        None,
        TensorType(DTYPES[problem.result], ("T", problem.columns)),
        norm=Norm(Value(TensorType(_BF16, (problem.depth,)), input=_GAIN), EPS) if problem.norm else None,
        gate=Gate("silu", 0, problem.columns) if problem.gated else None,
        residual=Value(TensorType(_BF16, ("T", problem.columns)), input=_RESIDUAL) if problem.residual else None,
    )
    if tiles is not None:
        one = isinstance(tiles, QuantMatvecTiles)
        fields = linear.problem(1 if one else max(16, padded)).fields()
        choice = Choice(kernel=QUANT_MATVEC if one else LINEAR, problem=fields, tiles=asdict(tiles), source="measured")
        schedule.given = {choice.key: choice}
    return schedule, schedule_linear(linear, schedule)


def launcher(machine: Machine, case: Case, tiles: _Tiles | None = None) -> Launcher:
    """Return a function that launches a matmul on given inputs (`schedule_of`)."""
    return Launcher(*schedule_of(machine, case, tiles), {"T": case.tokens})


def inputs_of(case: Case, generator: torch.Generator) -> Inputs:
    """Return random inputs of a call: x, the parts of the weight, the norm's weight and the residual."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    made: dict[str, torch.Tensor] = {}
    for part, one in case.types.items():
        shape = one.bind({})
        if part == "input_scale":
            made[part] = torch.full(shape, 1 / 64, device=DEVICE)
        elif one.dtype.is_floating_point:
            numbers = drawn(*shape)
            made[part] = (numbers * 8 if part == "weight" else numbers.abs() * 1e-3 + 1e-3).to(one.dtype)
        else:
            low, high = (-127, 128) if one.dtype is torch.int8 else (0, 16 if part == "zeros" else 256)
            made[part] = torch.randint(low, high, shape, generator=generator, device=DEVICE, dtype=one.dtype)
    vectors = [
        drawn(case.tokens, case.problem.depth),
        drawn(case.problem.depth),
        drawn(case.tokens, case.problem.columns),
    ]
    x, gain, residual = (one.to(_BF16) for one in vectors)
    return [x, *(made.get(part) for part in PARTS), gain, residual]


def expected(case: Case, inputs: Inputs) -> torch.Tensor:
    """Return the result of a call in float32. x is rounded where a region rounds it."""
    x, weight, scales, zeros, *others, gain, residual = inputs
    problem = case.problem
    full = x.float()
    if problem.norm:
        inverse = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + EPS)
        full = ((full * inverse).to(_BF16).float() * gain.float()).to(_BF16).float()
    result = ops.quant_linear.reference(full, weight, scales, zeros, None, *others, format=case.format.name)
    if problem.gated:
        gate, up = result.split(problem.columns, 1)
        result = torch.nn.functional.silu(gate) * up
    return result + residual.float() if problem.residual else result


def ours(machine: Machine, case: Case, inputs: list[Inputs], wanted: torch.Tensor, tiles: _Tiles | None) -> Recorded:
    """Capture a CUDA graph of calls of Ingot's kernels. Raises RuntimeError for results other than `wanted`."""
    call = launcher(machine, case, tiles)
    call(inputs[-1])
    return check(Recorded(captured(partial(call, one) for one in inputs), len(inputs), call), call.output, wanted)


def cublas(case: Case) -> Recorded:
    """Capture a CUDA graph of calls of cuBLAS for the matmul alone in bf16."""
    problem, generator = case.problem, torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(case.tokens, problem.depth, generator=generator, device=DEVICE).to(_BF16)
    out = x.new_empty(case.tokens, problem.rows)
    count = min(MOST_LAUNCHES, max(4, TRAFFIC // problem.bytes))
    weights = [torch.empty(problem.rows, problem.depth, dtype=_BF16, device=DEVICE) for _ in range(count)]
    for weight in weights:
        weight.normal_(generator=generator).mul_(0.02)
    launches = [partial(torch.mm, x, weight.T, out=out) for weight in weights]
    launches[-1]()  # sets cuBLAS up outside the recording
    return check(Recorded(captured(launches), len(launches), (x, out)), out, x.float() @ weights[-1].float().T)


def candidates(machine: Machine, case: Case) -> tuple[_Tiles, list[_Tiles]]:
    """Return the tile sizes of a compile, and those to search."""
    (choice,) = schedule_of(machine, case)[0].choices
    if choice.kernel == QUANT_MATVEC:
        one = QuantMatvecTiles(**choice.tiles)
        return one, one_token_tiles(one, case.problem.product(), case.format)
    base, found = Tiles(**choice.tiles), []
    # With 64 rows and 4 warps a tile is one instruction of Hopper for four warps, which wait for it together. Smaller
    # ones are instructions of single warps.
    shapes = ((64, 4), (128, 4), (32, 2), (64, 2), (16, 1), (32, 1))
    for (rows, warps), splits, stages, many in itertools.product(shapes, (1, 2, 4, 6, 8), (3, 4, 6, 8), (1, 2)):
        if warps < 4 and (splits == 6 or stages != 4):
            continue
        programs = -(-case.problem.columns // rows) * splits
        if splits == 1 or 0.7 * machine.cores <= programs * warps / 4 <= 8 * machine.cores:
            sizes = replace(base, block_n=rows, splits=splits, stages=stages, block_k=base.block_k * many)
            found.append(replace(sizes, warps=warps))
    return base, found


def best_tiles(machine: Machine, case: Case, inputs: list[Inputs], wanted: torch.Tensor) -> _Tiles:
    """Time a matmul with several tile sizes. Print and return the fastest."""
    base, searched = candidates(machine, case)
    tried: dict[_Tiles, float] = {}
    for tiles in searched:
        try:
            tried[tiles] = min(take_turns({"triton": ours(machine, case, inputs, wanted, tiles)}, rounds=3)["triton"])
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            print(f"  {case.call.what}: {tiles}: {error}"[:200], flush=True)
    best = min(tried, key=lambda tiles: tried[tiles])
    print(f"  {case.call.what}: {best} {tried[best] * 1e6:.2f} us; a compile's: {base}", flush=True)
    return best


def measure(machine: Machine, case: Case, sweep: bool) -> dict[str, list[float]]:
    """Return the seconds of a call in each round of measurement, by implementation."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    inputs = [inputs_of(case, generator) for _ in range(case.calls)]
    wanted = expected(case, inputs[-1])
    tiles = best_tiles(machine, case, inputs, wanted) if sweep and case.tokens <= GPU_FEW_TOKENS else None
    return take_turns({"triton": ours(machine, case, inputs, wanted, tiles), "cublas": cublas(case)})


def main() -> None:
    parser = kernel_parser(__doc__ or "", 120.0)
    parser.add_argument("--formats", default=FORMATS, help="names of formats, separated by commas")
    parser.add_argument("--tokens", default=TOKENS, help="tokens of steps, separated by commas")
    parser.add_argument("--one-token", choices=("matvec", "tile"), default="matvec", help="the kernel for one token")
    parser.add_argument("--sweep", action="store_true", help="search tile sizes first")
    options = parser.parse_args()
    machine, steps = this_machine(), list(map(int, options.tokens.split(",")))
    found = cases(Decoder.of(options.shape), options.formats.split(","), steps, options.one_token == "tile")
    peak = Peak(copy_bandwidth("cuda"), product_rate())
    work = ((case.call, partial(measure, machine, case, options.sweep)) for case in found)
    figures, missing = measure_figures("quant_linear", work, peak, options.seconds, ours="triton", peer="cublas")
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
