"""A built library: one call of `paged_attention`, for the types that it was built for."""

import ctypes
from pathlib import Path

import torch

from ingot.backends.torch_cuda import current_stream, new_tensor
from ingot.ir.errors import BackendError, InternalError

# Tensors that the kernels load 16 bytes at once from lie at multiples of this.
_ALIGNMENT = 16


class _Call(ctypes.Structure):
    """`ingot::Call` of kernels/attention.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "kv", "q", "page_table", "q_starts", "q_lens", "kv_lens")),
        ("work", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("tokens", "sequences", "width", "pages")),
    ]


class Library:
    """What `build` left. Raises BackendError for a file that does not load."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._words, self._prepare = library.ingot_work_words, library.ingot_prepare
            self._run = library.ingot_attention
        except (OSError, AttributeError) as error:
            raise BackendError(f"the library does not load: {error}", where=str(path)) from error
        self._sizes, self._needed = (0, 0), 0  # of the last call, for the layers of a step are alike
        self._words.restype, self._words.argtypes = ctypes.c_int64, [ctypes.c_int32, ctypes.c_int32]
        self._prepare.restype, self._prepare.argtypes = ctypes.c_char_p, []
        self._run.restype, self._run.argtypes = ctypes.c_char_p, [ctypes.POINTER(_Call)]

    def work_words(self, tokens: int, sequences: int) -> int:
        """Numbers of 4 bytes."""
        return int(self._words(tokens, sequences))

    def prepare(self) -> None:
        """What is done once before the first call: code goes to the GPU, and a stream is made."""
        _check(self._prepare())

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        page_table: torch.Tensor,
        q_starts: torch.Tensor,
        q_lens: torch.Tensor,
        kv_lens: torch.Tensor,
        sharing: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """[attention], on torch's current stream; the arguments are those of `paged_attention`. `sharing` is ignored:
        steps that feed prompts share nothing."""
        for name, tensor in (("q", q), ("kv", kv)):
            if tensor.data_ptr() % _ALIGNMENT:
                raise InternalError(f"{name} of a call lies at {tensor.data_ptr():#x}", expected=f"/{_ALIGNMENT}")
        (tokens, heads, size), (sequences, width) = q.shape, page_table.shape
        if (tokens, sequences) != self._sizes:
            self._sizes, self._needed = (tokens, sequences), self.work_words(tokens, sequences)
        out = new_tensor((tokens, heads, size), (heads * size, size, 1), q.dtype)
        work = new_tensor((self._needed,), (1,), torch.int32)
        call = _Call(
            *(one.data_ptr() for one in (out, kv, q, page_table, q_starts, q_lens, kv_lens, work)),
            current_stream(q.device),
            tokens, sequences, width, kv.shape[0],
        )  # fmt: skip
        _check(self._run(ctypes.byref(call)))
        return [out]


def _check(problem: bytes | None) -> None:
    if problem is not None:
        raise BackendError(f"FlashInfer's attention failed: {problem.decode(errors='replace')}")
