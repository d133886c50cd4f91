"""The flashinfer backend at compile time: claims attention of steps of many tokens, and builds kernels for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import fx

from ingot.backends.flashinfer.build import KERNELS, LIBRARY, build
from ingot.backends.flashinfer.library import Library
from ingot.backends.flashinfer.packages import Missing, find_packages
from ingot.backends.table import claim_cost
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass, Executable
from ingot.ir.backend import No, Yes
from ingot.ir.cache.dtype import is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import BackendError
from ingot.ir.machine.target import Target
from ingot.ir.masks import Mask
from ingot.ir.ops import op_of, paged_attention
from ingot.ir.program import Program, held_type, named_arguments, named_values, target_name
from ingot.ir.types import DTYPE_NAMES, TensorType

_DTYPES = {torch.bfloat16: "INGOT_BF16", torch.float16: "INGOT_F16"}
_DIMS = (64, 128, 256)
_VECTOR = 8  # elements of a load of the kernels, which has 16 bytes


class FlashInfer:
    """The flashinfer backend: prefill attention over the paged KV cache, with kernels of the FlashInfer package.

    `kernel` is "fa2" or "fa3" (FlashAttention-2 or 3). If it is None, the GPU and the page size decide.
    """

    name = "flashinfer"
    compiles_calls = True

    def __init__(self, kernel: str | None = None) -> None:
        self._kernel = kernel

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if target.device != "cuda" or target.sm is None:
            return No(f"not for device '{target.device}'")
        for node in nodes:
            if op_of(node.target) is not paged_attention:
                return No(f"no kernel for {target_name(node.target)}")
            if reason := _refusal(node, target.sm, bucket):
                return No(reason)
        packages = find_packages()
        if isinstance(packages, Missing):
            return No(packages.reason)
        return Yes(sum(claim_cost(self.name, self._kernel_for(node, target.sm)) for node in nodes))

    def workspace(
        self, body: Program, executable: Executable, directory: Path, sizes: Mapping[str, int], threads: int
    ) -> int:
        """Return the bytes of GPU memory that one call allocates for its result and scratch memory. Needs no GPU.

        `body` is the program with the call. `sizes` maps its symbolic dims, such as "T", to sizes. `directory` holds
        the built library. `threads` is unused.
        """
        q, page_table = (held_type(named_values(_call_of(body))[name]) for name in ("q", "page_table"))
        tokens, heads, dim = q.bind(sizes)
        words = Library(directory / LIBRARY).work_words(tokens, page_table.bind(sizes)[0])
        return tokens * heads * dim * q.dtype.itemsize + words * torch.int32.itemsize

    def sources(self) -> Sequence[Path]:
        folder = Path(__file__).parent
        return [*sorted(path for path in folder.glob("*.py") if path.name != "load.py"), *sorted(KERNELS.iterdir())]

    def toolchain(self) -> dict[str, str]:
        packages = find_packages()
        return {"flashinfer": "none"} if isinstance(packages, Missing) else dict(packages.versions)

    def emit(self, body: Program, key: str, target: Target, directory: Path) -> Executable:
        """Build the library for the one attention call in `body`. `directory` receives the file.

        The returned Executable describes the library; `key` is its id. Raises BackendError if the packages are missing
        or nvcc fails.
        """
        packages = find_packages()
        if isinstance(packages, Missing):
            raise BackendError(packages.reason, where=body.name)
        assert target.sm is not None
        node = _call_of(body)
        build(self._kernel_for(node, target.sm), _constants(node), target.sm, packages, directory)
        return Executable(
            id=key,
            backend=self.name,
            inputs=tuple(str(held_type(source)) for source in body.placeholders()),
            outputs=(str(node.meta["type"]),),
            files=(LIBRARY,),
        )

    def _kernel_for(self, node: fx.Node, sm: int) -> str:
        page = held_type(named_values(node)["kv"]).shape[2]
        assert isinstance(page, int)
        return self._kernel or kernel_for(sm, page)


def kernel_for(sm: int, page: int) -> str:
    """Return the kernel, "fa3" or "fa2", for compute capability `sm` and pages of `page` positions.

    FlashAttention-3 needs Hopper (`sm` 90), and a page size that is a multiple of 8.
    """
    return "fa3" if sm == 90 and page % 8 == 0 else "fa2"


def _refusal(node: fx.Node, sm: int, bucket: BucketClass) -> str | None:
    """Return why FlashInfer has no kernel for a `paged_attention` call, or None if it has one.

    `sm` is the compute capability, 90 for Hopper. `bucket` is the range of step sizes that the call is compiled for.
    """
    if sm < 80:
        return f"kernels need compute capability 8.0, and this is {sm // 10}.{sm % 10}"
    if bucket.tokens[1] <= GPU_FEW_TOKENS:  # tiles of 128 rows would be mostly empty
        return f"the kernels are for steps of more than {GPU_FEW_TOKENS} tokens, and these have {bucket.tokens[1]}"
    if bucket.q_max == 1:
        return "the kernels are for prefill, and these steps have one token per sequence"
    types = {name: held_type(source) for name, source in named_values(node).items()}
    q, kv = types["q"], types["kv"]
    if is_narrow(kv.dtype):
        return f"the kernels are built for caches of q's dtype, and this one is of {DTYPE_NAMES[kv.dtype]}"
    if q.dtype is not kv.dtype or q.dtype not in _DTYPES:
        return "no kernel for " + " with ".join(sorted({DTYPE_NAMES[q.dtype], DTYPE_NAMES[kv.dtype]}))
    if "sinks" in types:
        return "no kernel for attention sinks"
    if "slopes" in types:
        return "no kernel for slopes of positions (ALiBi)"
    form = CacheForm.of_cache(kv.shape, q.shape[2], named_arguments(node)["value_width"])
    if not form.equal:
        return f"{form}, and the kernels need keys and values of one width"
    if q.shape[2] not in _DIMS:
        return f"heads of {q.shape[2]} elements, and the kernels support {', '.join(map(str, _DIMS))}"
    if any(isinstance(size, str) for size in (*q.shape[1:], *kv.shape[2:])):
        return f"sizes that are no numbers: q {q}, kv {kv}"
    mask = Mask.named(named_arguments(node)["mask"])
    if mask.kind not in ("causal", "window"):
        return f"no kernel for the mask {mask.name}"
    token, head, element = _strides(q)
    if element != 1 or token % _VECTOR or head % _VECTOR:
        return f"the strides of q are not multiples of 16 bytes: {q}"
    if odd := [name for name, one in types.items() if name not in ("q", "kv") and one.dtype is not torch.int32]:
        return f"{odd[0]} is {types[odd[0]]}, not i32"
    return None


def _constants(node: fx.Node) -> dict[str, object]:
    """Return the values of the C++ macros that the kernel's source reads, such as head counts, by macro name."""
    types = {name: held_type(source) for name, source in named_values(node).items()}
    q, (_, _, page, kv_heads, dim) = types["q"], types["kv"].shape
    call = named_arguments(node)
    token, head, _ = _strides(q)
    mask = Mask.named(call["mask"])
    return {
        "INGOT_HEADS": q.shape[1],
        "INGOT_KV_HEADS": kv_heads,
        "INGOT_DIM": dim,
        "INGOT_PAGE": page,
        "INGOT_SCALE": repr(float(call["scale"])),
        "INGOT_WINDOW": mask.size or -1,
        "INGOT_SOFT_CAP": repr(float(call["soft_cap"] or 0.0)),
        "INGOT_Q_TOKEN": token,
        "INGOT_Q_HEAD": head,
        _DTYPES[q.dtype]: 1,
    }


def _strides(q: TensorType) -> tuple[int, int, int]:
    if q.strides is not None:
        token, head, element = q.strides
        return token, head, element
    _, heads, dim = q.shape
    assert isinstance(heads, int) and isinstance(dim, int)
    return heads * dim, dim, 1


def _call_of(body: Program) -> fx.Node:
    return next(iter(body.calls()))
