"""FlashInfer's wrappers, as far as benchmarks call them: attention in float32, from what a plan was given."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch


class Wrapper:
    """What both wrappers share. A plan says where each sequence's queries and pages begin, and how full the last page
    is."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype is torch.uint8 and layout == "NHD"

    def run(self, q: torch.Tensor, kv: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        assert q.is_contiguous() and q.shape[1:] == (self.heads, self.dim)
        for b, last in enumerate(self.last.tolist()):
            pages = kv[self.indices[self.starts[b] : self.starts[b + 1]].long()]  # [pages, 2, page, heads, dim]
            keys, values = pages.float().transpose(0, 1).flatten(1, 2)[:, : (len(pages) - 1) * self.page + last]
            rows = slice(int(self.q_starts[b]), int(self.q_starts[b + 1]))
            own = q[rows].float().transpose(0, 1)
            keys, values = (
                one.repeat_interleave(self.heads // self.kv_heads, 1).transpose(0, 1) for one in (keys, values)
            )
            scores = own @ keys.transpose(1, 2) * self.dim**-0.5
            seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
            out[rows] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1).to(out.dtype)
        return out

    def _plan(self, q_starts: torch.Tensor, pages: tuple[torch.Tensor, ...], *sizes: int) -> None:
        self.q_starts, (self.starts, self.indices, self.last) = q_starts, pages
        self.heads, self.kv_heads, self.dim, self.page = sizes
        assert self.starts[-1] == len(self.indices)
        assert {one.dtype for one in (q_starts, *pages)} == {torch.int32}


class Decode(Wrapper):
    def plan(self, starts: Any, indices: Any, last: Any, *sizes: int, q_data_type: Any, kv_data_type: Any) -> None:
        assert q_data_type is kv_data_type
        self._plan(torch.arange(len(starts), dtype=torch.int32), (starts, indices, last), *sizes)


class Prefill(Wrapper):
    def plan(
        self, q_starts: Any, starts: Any, indices: Any, last: Any, *sizes: int, causal: bool, **dtypes: Any
    ) -> None:
        assert causal and dtypes.keys() == {"q_data_type", "kv_data_type"}
        self._plan(q_starts, (starts, indices, last), *sizes)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the package `flashinfer`."""
    module: Any = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
