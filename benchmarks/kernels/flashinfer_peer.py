"""FlashInfer's own wrappers over Ingot's pages, used as its documentation shows: planned on the host, outside the
timing. Its library compiles them on first use."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch

_WORKSPACE = 512 << 20  # bytes; the recommended 128 MB are too few for some splits of long contexts


def installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def missing(part: str) -> dict[str, str]:
    """Return the result's entry for a missing FlashInfer."""
    return (
        {} if installed() else {f"{part}.flashinfer": "FlashInfer is not installed (pip install 'ingot[flashinfer]')"}
    )


def build(kernel: str, dim: int, dtype: torch.dtype) -> None:
    """Compile the kernels of "fa2" or "fa3" for heads of `dim`, unless they are compiled. Needs nvcc, but no GPU."""
    from flashinfer.prefill import get_batch_prefill_module

    none = (0, False, False, False)  # no rotation, window, soft cap or matmuls in fp16
    get_batch_prefill_module(kernel, dtype, dtype, dtype, torch.int32, dim, dim, *none)


def workspace(device: torch.device) -> torch.Tensor:
    """Return the scratch memory of all calls on one stream."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def decode_call(
    scratch: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, contexts: Sequence[int]
) -> tuple[Callable[[], object], torch.Tensor]:
    """Return a call and its result: attention of one token of each sequence, q [B, heads, dim], over pages [pages, 2,
    page, kv_heads, dim]. It uses tensor cores, the faster kernel if several heads of q share one of k."""
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
    """Return a call and its result: causal attention of the last `fed` tokens of each sequence, q [sum(fed), heads,
    dim]. FlashInfer chooses the kernel, FlashAttention-3 on compute capability 9.0."""
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
    """Return where each sequence's pages begin in a list of all pages, that list, and the fill of each last page."""
    needed = [-(-context // page) for context in contexts]
    indices = torch.cat([row[:count] for row, count in zip(page_table, needed, strict=True)])
    last = torch.tensor([(context - 1) % page + 1 for context in contexts], dtype=torch.int32).to(indices.device)
    return _starts(needed, indices.device), indices, last


def _starts(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().to(device)
