"""Which backend computes attention by which mask over a cache of which dtype.

Each combination is taken, and then tested against the float64 reference, or refused by a reason that names it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from eight_bit_samples import FLOAT8, INT8, in_eight_bits
from one_call import OneCall
from triton_attention import MASKS, a_step

from ingot.backends.cpu.emit import Cpu
from ingot.backends.flashinfer.emit import FlashInfer
from ingot.backends.flashinfer.packages import Missing, find_packages
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.backends.triton.emit import Triton
from ingot.ir.artifact.plan import BucketClass, owed_features
from ingot.ir.backend import Backend, No
from ingot.ir.machine.target import Target
from ingot.ir.masks import KINDS, Mask
from ingot.ir.ops import OPS
from ingot.ir.types import DTYPE_NAMES

TREE = "tree"
OPS_OVER_CACHES = ("append_attention", "paged_attention", "partial_attention")
FEW, MANY = (BucketClass(name="steps", tokens=tokens) for tokens in ((1, 16), (65, 2048)))
INVARIANT = BucketClass(name="steps", tokens=(65, 2048), features=owed_features(deterministic=True))


@dataclass(frozen=True)
class Asked:
    """A call of `op` by `mask` over a cache of the dtype `narrow`, or of q's dtype, in steps of a bucket class."""

    op: str
    mask: str
    narrow: torch.dtype | None
    bucket: BucketClass

    def call(self) -> OneCall:
        step = a_step([(2, 40), (1, 7)], torch.bfloat16)
        kv = step.kv if self.narrow is None else in_eight_bits(step.kv, self.narrow)
        options = {"scale": 0.125, "mask": self.mask, **({"k_scale": 0.3, "v_scale": 1.7} if self.narrow else {})}
        bits = (None, torch.zeros(len(step.q), dtype=torch.int64)) if self.mask == TREE else ()
        if self.op != "append_attention":
            return OneCall(self.op, (step.q, kv, *step.lens, *bits), options)
        args = (kv, step.q, step.k, step.v, step.positions, torch.zeros(64, 64), step.slots, *step.lens)
        return OneCall(self.op, args, {"eps": 1e-6, **options})


def of_triton(asked: Asked) -> str | None:
    """Numbers: in tests/backends/triton test_attention.py, test_cache_dtype.py, test_invariant.py and
    test_attention_shared.py; on a GPU also tests/gpu/test_every_op.py."""
    if asked.op == "append_attention":
        if asked.bucket is INVARIANT:
            return "so its bits depend on the step"
        if asked.bucket is MANY:
            return "the kernel is for steps of up to 64 tokens, and these have 2048"
        if Mask.named(asked.mask).looks_ahead:
            return f"with the mask {asked.mask} a token sees later tokens of the step"
    if asked.mask == TREE and asked.bucket is INVARIANT:
        return "no kernel sums a tree in an order that is independent of the tree"
    return None


def of_flashinfer(asked: Asked) -> str | None:
    """Numbers: tests/gpu/test_flashinfer.py."""
    if asked.op != "paged_attention":
        return f"no kernel for ingot.{asked.op}"
    if asked.bucket is FEW:
        return "the kernels are for steps of more than 64 tokens, and these have 16"
    if asked.narrow is not None:
        return f"the kernels are built for caches of q's dtype, and this one is of {DTYPE_NAMES[asked.narrow]}"
    if Mask.named(asked.mask).kind not in ("causal", "window"):
        return f"no kernel for the mask {asked.mask}"
    packages = find_packages()
    return packages.reason if isinstance(packages, Missing) else None


def of_cpu(asked: Asked) -> str | None:
    """Numbers: tests/backends/test_cpu.py, test_cpu_cache_forms.py."""
    return None if asked.op == "paged_attention" else f"no kernel for ingot.{asked.op}"


def of_references(_: Asked) -> str | None:
    return None


def of_references_that_stand_in(_: Asked) -> str | None:
    return "does not replace a missing kernel of this op"


# Of each backend and target what it refuses, and the reason.
TABLE: list[tuple[Backend, str, Callable[[Asked], str | None]]] = [
    (Triton(), "sm_90", of_triton),
    (FlashInfer(), "sm_90", of_flashinfer),
    (Cpu(), "cpu", of_cpu),
    (Reference(), "cpu", of_references),
    (Rowwise(), "cpu", of_references),
    (Reference(asked=False), "cpu", of_references),
    (Reference(), "sm_90", of_references),
    (Rowwise(asked=False), "sm_90", of_references_that_stand_in),
    (Reference(asked=False), "sm_90", of_references_that_stand_in),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("narrow", [None, FLOAT8, INT8], ids=["auto", "fp8", "int8"])
@pytest.mark.parametrize("mask", [*MASKS, TREE])
def test_every_mask_and_cache_is_taken_or_refused_by_name(mask: str, narrow: torch.dtype | None) -> None:
    for op in OPS_OVER_CACHES:
        if mask == TREE and op != "paged_attention":
            continue  # other ops have no ancestors, and are no programs: `check_mask`
        for bucket in (FEW, MANY, INVARIANT):
            asked = Asked(op, mask, narrow, bucket)
            call = asked.call()
            body = call.body()
            for backend, target, refuses in TABLE:
                answer = backend.claim([call.call_of(body)], Target.named(target), bucket)
                wanted = refuses(asked)
                assert isinstance(answer, No) == (wanted is not None), (backend.name, target, asked, answer)
                assert wanted is None or wanted in answer.reason, (backend.name, target, asked, answer)  # type: ignore[union-attr]


def test_the_table_has_every_kind_of_mask_and_every_op_that_reads_a_cache() -> None:
    assert {Mask.named(mask).kind for mask in (*MASKS, TREE)} == set(KINDS)
    reading = {name for name, op in OPS.items() if {"kv", "mask"} <= set(op.parameters.names)}
    assert reading == set(OPS_OVER_CACHES) and all(OPS[name].needs_kernel for name in reading)


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_gpus_that_do_not_convert_eight_bits_refuse_them(target: str) -> None:
    for op in OPS_OVER_CACHES:
        call = Asked(op, "causal", FLOAT8, FEW).call()
        answer = Triton().claim([call.call_of(call.body())], Target.named(target), FEW)
        assert answer == No("a cache of f8e4m3, and kernels for it need sm_89 or newer")
        call = Asked(op, "causal", INT8, FEW).call()
        assert not isinstance(Triton().claim([call.call_of(call.body())], Target.named(target), FEW), No)
