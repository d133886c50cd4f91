"""One region body that holds every op a region compiler takes, so that one compile tests them all, and checks."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ingot.ir import build, ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.interpret import interpret
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS, Op, Sample
from ingot.ir.ops.aten import ATEN
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType

T_MAX, L_MAX = 300, 40
POSITIONS = 64
DTYPES = (torch.float32, torch.bfloat16)
# Into how many bodies the samples of each op are divided: a compile of all samples takes half a minute.
SHARES = 4


@dataclass
class EveryOp:
    """The body, the tensors for inputs of fixed size, and which outputs are results of which sample."""

    body: Program
    fixed: dict[str, torch.Tensor] = field(default_factory=dict)
    samples: list[tuple[Op, torch.dtype, Sample, list[str]]] = field(default_factory=list)
    outputs: dict[str, fx.Node] = field(default_factory=dict)

    def call(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        return build.call(self.body, target.overload if isinstance(target, Op) else target, args, kwargs)

    def give(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """An input of fixed size, and the tensor to call it with."""
        self.fixed[name] = tensor
        strides = None if tensor.is_contiguous() else tensor.stride()
        return self.body.add_input(name, TensorType(tensor.dtype, tuple(tensor.shape), strides))

    def inputs(self, tokens: int, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Every input by name, for a step of `tokens` tokens and `rows` rows of logits."""
        generator = torch.Generator().manual_seed(seed)
        values: dict[str, torch.Tensor] = {}
        for name, value_type in self.body.input_types().items():
            if name in self.fixed:
                values[name] = self.fixed[name]
                continue
            shape = value_type.bind({"T": tokens, "L": rows})
            if value_type.dtype.is_floating_point:
                values[name] = torch.randn(shape, generator=generator).to(value_type.dtype)
            else:
                values[name] = torch.randint(0, POSITIONS, shape, generator=generator, dtype=value_type.dtype)
        return values


def _layer(every: EveryOp, dtype: torch.dtype, table: fx.Node, positions: fx.Node) -> None:
    """What stands between two attentions: norms, merged linears, heads, rope, a gated MLP; views among the results."""
    name = str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(1)

    def weight(part: str, *shape: int) -> fx.Node:
        return every.give(f"{name}.{part}", (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype))

    x, h = (every.body.add_input(f"{name}.{part}", TensorType(dtype, ("T", 48))) for part in ("x", "h"))
    last = every.body.add_input(f"{name}.last", TensorType(dtype, ("L", 48)))
    norm, head_norm = weight("norm", 48), weight("head_norm", 8)
    both = every.call(ops.add_rms_norm, x, h, norm, eps=1e-5)
    normed, total = (every.call(operator.getitem, both, index) for index in (0, 1))
    product = every.call(ops.linear, normed, weight("qkv", 64, 48), weight("qkv.bias", 64))
    q, k, v = (
        every.call(
            ATEN["aten.view.default"].overload,
            every.call(ATEN["aten.slice.Tensor"].overload, product, 1, begin, begin + width),
            [-1, width // 8, 8],
        )
        for begin, width in ((0, 32), (32, 16), (48, 16))
    )
    q = every.call(ops.rms_norm, q, head_norm, eps=1e-6)
    gated = every.call(ops.linear, total, weight("gate_up", 96, 48))
    gate, up = (every.call(ATEN["aten.slice.Tensor"].overload, gated, 1, begin, begin + 48) for begin in (0, 48))
    mlp = every.call(ops.silu_mul, gate, up)
    scaled = every.call(ATEN["aten.mul.Tensor"].overload, every.call(ATEN["aten.add.Tensor"].overload, total, mlp), 0.5)
    logits = every.call(ops.cast, every.call(ops.rms_norm, last, norm, eps=1e-5), dtype=torch.float32)
    results = {
        "total": total,
        "q": every.call(ops.rope, q, positions, table),
        "k": every.call(ops.rope, k, positions, table),
        "v": v,  # a view with the strides of the merged product
        "mlp": scaled,
        "logits": logits,
    }
    every.outputs |= {f"{name}.{part}": node for part, node in results.items()}


def _samples(op: Op, dtype: torch.dtype, share: int | None) -> Sequence[Sample]:
    samples = op.samples(torch.Generator().manual_seed(3), dtype)
    return samples if share is None else samples[share::SHARES] or samples[share % len(samples) :][:1]


def every_op(
    dtypes: Sequence[torch.dtype] = DTYPES, share: int | None = None, without: Collection[str] = ()
) -> EveryOp:
    """In each of these dtypes: a layer at any T and L, and each sample of each fusible op at its own fixed sizes.

    With a `share`, a number below SHARES, only every fourth sample of each op, and one at least. No samples of the ops
    `without`.
    """
    every = EveryOp(Program("every_op", Stage.FUSED, {"T": Dim("T", 1, T_MAX), "L": Dim("L", 1, L_MAX)}))
    generator = torch.Generator().manual_seed(2)
    positions = every.body.add_input("positions", TensorType(torch.int32, ("T",)))
    angles = torch.rand(POSITIONS, 4, generator=generator) * 6
    table = every.give("table", torch.cat([angles.cos(), angles.sin()], -1))
    for dtype in dtypes:
        _layer(every, dtype, table, positions)
        for op in OPS.values():
            for sample in _samples(op, dtype, share) if op.fusible and op.name not in without else ():
                if any(isinstance(arg, torch.Tensor) and arg.dtype is torch.float8_e8m0fnu for arg in sample.args):
                    continue  # refused: C++ has no name for the type
                prefix = f"{op.name}.{len(every.samples)}"
                args = [
                    every.give(f"{prefix}.{place}", value) if isinstance(value, torch.Tensor) else value
                    for place, value in enumerate(sample.args)
                ]
                result = every.call(op, *args, **sample.kwargs)
                items = getattr(result.meta["type"], "items", None)
                taken = (
                    [result] if items is None else [every.call(operator.getitem, result, i) for i in range(len(items))]
                )
                names = [f"{prefix}.result.{index}" for index in range(len(taken))]
                every.outputs |= dict(zip(names, taken, strict=True))
                every.samples.append((op, dtype, sample, names))
    every.body.set_outputs(every.outputs)
    return every


def check_samples(every: EveryOp, results: Mapping[str, torch.Tensor]) -> None:
    """Assert that the results of each sample are its reference's, within the tolerances of ops."""
    for op, dtype, sample, names in every.samples:
        expected = op.reference(*sample.args, **sample.kwargs)
        for name, right in zip(names, expected if isinstance(expected, tuple) else (expected,), strict=True):
            problem = compare(results[name].cpu(), right, right.dtype)
            assert problem is None, f"{op.name} in {dtype}: {problem}"


def check_size(every: EveryOp, inputs: dict[str, torch.Tensor], found: dict[str, torch.Tensor], **sizes: int) -> None:
    """Assert that each result has its type at these sizes, and is as near to float64 as the interpreter's."""
    plain, exact = (interpret(every.body, inputs, exact=exact) for exact in (False, True))
    for name, node in every.body.output_nodes().items():
        assert node.meta["type"].mismatch(found[name], sizes) is None
        errors = Measured(plain[name], exact[name]), Measured(found[name], exact[name])
        problem = breach(Numerics.ROUNDING, *errors, plain[name].dtype)
        assert problem is None, f"{name} at {sizes}: {problem}"
