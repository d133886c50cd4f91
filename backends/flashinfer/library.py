"""Load and call a built FlashInfer library. It computes `paged_attention` for the types that it was built for."""

import ctypes
from pathlib import Path

import torch

from ingot.backends.torch_cuda import current_stream, new_tensor
from ingot.ir.errors import BackendError, InternalError

# The kernels read q and kv by loads of 16 bytes, so their addresses must be multiples of this.
_ALIGNMENT = 16


class _Call(ctypes.Structure):
    """The arguments of a library call as ctypes fields, equal to the struct `ingot::Call` in kernels/attention.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "kv", "q", "page_table", "q_starts", "q_lens", "kv_lens")),
        ("work", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("tokens", "sequences", "width", "pages")),
    ]


class Library:
    """A loaded attention library, which `flashinfer.build` made for one call. Calling it computes the attention.

    `path` is the library's shared object. Raises BackendError if the file does not load.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._words, self._prepare = library.ingot_work_words, library.ingot_prepare
            self._run = library.ingot_attention
        except (OSError, AttributeError) as error:
            raise BackendError(f"the library does not load: {error}", where=str(path)) from error
        self._sizes, self._needed = (0, 0), 0  # of the last call: the layers of a step have equal sizes
        self._words.restype, self._words.argtypes = ctypes.c_int64, [ctypes.c_int32, ctypes.c_int32]
        self._prepare.restype, self._prepare.argtypes = ctypes.c_char_p, []
        self._run.restype, self._run.argtypes = ctypes.c_char_p, [ctypes.POINTER(_Call)]

    def work_words(self, tokens: int, sequences: int) -> int:
        """Return the scratch memory, in words of 4 bytes, for a step with this many tokens and sequences."""
        return int(self._words(tokens, sequences))

    def prepare(self) -> None:
        """Load the GPU code and create the library's second CUDA stream. Call it once, before the first step."""
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
        """Compute the op `paged_attention` on torch's current stream, and return [attention], a list of one [T, H, D].

        The arguments are the op's. `sharing` is ignored, because prefill steps share no prefixes. Raises InternalError
        if q or kv is not 16-byte aligned, and BackendError if a launch fails.
        """
        for name, tensor in (("q", q), ("kv", kv)):
            if tensor.data_ptr() % _ALIGNMENT:
                raise InternalError(
                    f"{name} of a call is at the address {tensor.data_ptr():#x}",
                    expected=f"a multiple of {_ALIGNMENT}",
                )
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
