"""Call FlashInfer's own wrappers over Ingot's pages, as its documentation shows. They plan on the host, which is not
timed.

Its library compiles them on first use.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch

_WORKSPACE = 512 << 20  # bytes; the recommended 128 MB are too few for some splits of long contexts


def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def missing(part: str) -> dict[str, str]:
    """Return why FlashInfer is not measured in this part of the benchmark. Return an empty dict if FlashInfer is
    installed.

    The result maps a name to the reason, as in the field `missing` of a benchmark's result.
    """
    return (
        {} if installed() else {f"{part}.flashinfer": "FlashInfer is not installed (pip install 'ingot[flashinfer]')"}
    )


def build(kernel: str, dim: int, dtype: torch.dtype) -> None:
    """Compile FlashInfer's kernels "fa2" or "fa3" for heads of `dim` elements, unless they are compiled already.

    This needs nvcc, but no GPU.
    """
    from flashinfer.prefill import get_batch_prefill_module

    none = (0, False, False, False)  # no rotation, window, soft cap or matmuls in fp16
    get_batch_prefill_module(kernel, dtype, dtype, dtype, torch.int32, dim, dim, *none)


def workspace(device: torch.device) -> torch.Tensor:
    """Allocate and return scratch memory for FlashInfer. All calls on one stream can share it."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def decode_call(
    scratch: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, contexts: Sequence[int]
) -> tuple[Callable[[], object], torch.Tensor]:
    """Return a function that computes decode attention with FlashInfer, and the tensor that it writes.

    scratch      FlashInfer's scratch memory, from `workspace`
    q            one token of each sequence [B, heads, dim]
    kv           the pages of the KV cache [pages, 2, page, kv_heads, dim]
    page_table   the numbers of each sequence's pages [B, P]
    contexts     the number of cached positions of each sequence

    FlashInfer's kernel with tensor cores is used. It is faster if several query heads share a key head.
    """
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    page, kv_heads, dim = kv.shape[2:]
    sizes = (q.shape[1], kv_heads, dim, page)
    wrapper.plan(*_pages(page_table, contexts, page), *sizes, q_data_type=q.dtype, kv_data_type=kv.dtype)
    q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return partial(wrapper.run, q, kv, out=out), out


def prefill_call(
    scratch: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    fed: Sequence[int],
    contexts: Sequence[int],
) -> tuple[Callable[[], object], torch.Tensor]:
    """Return a function that computes causal prefill attention with FlashInfer, and the tensor that it writes.

    scratch      FlashInfer's scratch memory, from `workspace`
    q            the tokens of all sequences in this step [sum(fed), heads, dim]
    kv           the pages of the KV cache [pages, 2, page, kv_heads, dim]
    page_table   the numbers of each sequence's pages [B, P]
    fed          the number of tokens of each sequence in this step
    contexts     the number of positions of each sequence, including the tokens of this step

    FlashInfer chooses the kernel. On compute capability 9.0 it is FlashAttention-3.
    """
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD")
    page, kv_heads, dim = kv.shape[2:]
    starts = _starts(fed, q.device)
    sizes = (q.shape[1], kv_heads, dim, page)
    given = {"causal": True, "q_data_type": q.dtype, "kv_data_type": kv.dtype}
    wrapper.plan(starts, *_pages(page_table, contexts, page), *sizes, **given)
    out = torch.empty_like(q)
    return partial(wrapper.run, q, kv, out=out), out


def _pages(page_table: torch.Tensor, contexts: Sequence[int], page: int) -> tuple[torch.Tensor, ...]:
    """Convert the page table to the three integer tensors that FlashInfer takes.

    The first tensor says where each sequence's pages begin in a flat list of pages. The second is this list. The third
    has the number of used positions in each sequence's last page.
    """
    needed = [-(-context // page) for context in contexts]
    indices = torch.cat([row[:count] for row, count in zip(page_table, needed, strict=True)])
    last = torch.tensor([(context - 1) % page + 1 for context in contexts], dtype=torch.int32).to(indices.device)
    return _starts(needed, indices.device), indices, last


def _starts(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().to(device)
