"""The form of a KV cache: how keys and values are arranged in its pages.

A cache is [pages, parts, page, kv_heads, row]. There are three forms:

equal widths    [pages, 2, page, kv_heads, width]: keys at index 0 of the second axis, values at 1
two widths      [pages, 1, page, kv_heads, key_width + value_width]: a row is a key and then its value
shared          [pages, 1, page, kv_heads, key_width]: a row is a key, and its first numbers are the value

The shared form is the latent cache of multi-head latent attention (arXiv 2405.04434), in which all heads of q read one
row per token. The second axis tells equal widths from the other two forms; the width of q tells those apart. In every
form axis 2 holds the positions of a page and axis 3 the heads.

A cache of eight bits may store scales per token (`ingot.ir.cache.dtype`). Each row then ends in float32 scales: one
for its key or value, or two for a key and its value. They are aligned to 4 bytes, so up to 3 elements before them are
unused. A key of 128 elements takes 132 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ingot.ir.errors import VerifyError

if TYPE_CHECKING:  # so that `--help` does not import torch
    import torch


SCALE_BYTES = 4  # of a float32


class Shaped(Protocol):
    """Anything with a shape: a tensor, or the type of a tensor in a program."""

    @property
    def shape(self) -> Any: ...


@dataclass(frozen=True)
class CacheForm:
    """How a KV cache stores the key and the value of each head and position.

    key_width    the number of elements of a key
    value_width  the number of elements of a value
    shared       whether only the key is stored; its start is then the value, as in multi-head latent attention
    per_token    whether rows end in scales; the elements of the cache then have one byte
    """

    key_width: int
    value_width: int
    shared: bool = False
    per_token: bool = False

    def __post_init__(self) -> None:
        most = self.key_width if self.shared else self.value_width
        if not 0 < self.value_width <= most:
            raise VerifyError(
                f"values of {self.value_width} numbers with keys of {self.key_width}",
                expected=f"a value_width of 1 to {self.key_width}, where values are the first numbers of keys"
                if self.shared
                else "at least one number",
            )
        if self.per_token and not (self.shared or self.equal) and self.numbers % SCALE_BYTES:
            # Otherwise unused elements would hide the width of values, which readers take from the size of a row.
            raise VerifyError(
                f"scales per token for {self}", expected=f"a multiple of {SCALE_BYTES} numbers of a key and its value"
            )

    @staticmethod
    def given(q: Shaped, k: Shaped, v: Shaped | None, value_width: int | None) -> "CacheForm":
        """Return the form of the KV cache for attention of q [T, H, D] over k [T, KV, D] and v [T, KV, V].

        If v is None, values are the first `value_width` elements of the keys, as in multi-head latent attention.
        Otherwise `value_width` must be None. Raises VerifyError if the arguments do not fit together.
        """
        if k.shape[2] != q.shape[2]:
            raise VerifyError(
                f"q has heads of {q.shape[2]} numbers and k of {k.shape[2]}", expected="heads of one width"
            )
        if (v is None) != (value_width is not None):
            raise VerifyError(
                "attention without values" if v is None else "attention with v and with value_width",
                expected="v, or None and a value_width: values are then the first numbers of k",
            )
        return CacheForm.of(k, v, value_width)

    @staticmethod
    def of(k: Shaped, v: Shaped | None, value_width: int | None = None, *, per_token: bool = False) -> "CacheForm":
        """Return the form of a KV cache for keys k [T, KV, D] and values v [T, KV, V].

        If v is None, only keys are stored, and the first `value_width` elements of a key are its value. `value_width`
        None means all elements of the key. `per_token` says whether rows end in scales.
        """
        if v is None:
            width = k.shape[2] if value_width is None else value_width
            return CacheForm(k.shape[2], width, shared=True, per_token=per_token)
        return CacheForm(k.shape[2], v.shape[2], per_token=per_token)

    @staticmethod
    def of_cache(
        shape: Sequence[Any], key_width: Any, value_width: int | None, *, per_token: bool = False
    ) -> "CacheForm":
        """Return the form of a KV cache of this shape, for an attention op that reads it.

        `key_width` is the width of q, and so of a key. `value_width` is the op's argument of this name: a number if
        values are the first elements of keys, else None. `per_token` is an argument too. Raises VerifyError if the
        shape fits no form.
        """
        scales = 2 * SCALE_BYTES if per_token else 0
        if value_width is not None:
            form = CacheForm(key_width, value_width, shared=True, per_token=per_token)
        elif len(shape) == 5 and shape[1] == 1 and shape[4] - scales > key_width:
            form = CacheForm(key_width, shape[4] - scales - key_width, per_token=per_token)
        else:
            form = CacheForm(key_width, key_width, per_token=per_token)
        form.check(shape)
        return form

    @staticmethod
    def check_equal(kv: Shaped, k: Shaped, v: Shaped, *, per_token: bool = False) -> None:
        """Raise VerifyError unless k and v have equal widths and the cache `kv` has the shape for them.

        Fused ops that write the cache support only this case. `per_token` says whether rows end in scales.
        """
        form = CacheForm.of(k, v, per_token=per_token)
        if not form.equal:
            raise VerifyError(f"{form}", expected="keys and values of equal width, or kv_append")
        form.check(kv.shape)

    def check(self, shape: Sequence[Any]) -> None:
        """Raise VerifyError if a KV cache of this form cannot have the shape `shape`."""
        if len(shape) != 5 or (shape[1], shape[4]) != (self.parts, self.row):
            raise VerifyError(
                f"a cache {list(shape)} for {self}", expected=str(list(self.shape("page", "kv_heads"))).replace("'", "")
            )

    def __str__(self) -> str:
        scales = ", with scales per token" if self.per_token else ""
        if self.shared and self.value_width == self.key_width:
            return f"keys of {self.key_width} numbers{scales}"
        if self.shared:
            return f"keys of {self.key_width} numbers, of which {self.value_width} are values{scales}"
        return f"keys of {self.key_width} numbers and values of {self.value_width}{scales}"

    @property
    def equal(self) -> bool:
        """Return whether keys and values are stored separately and have equal widths.

        The cache's second axis then has keys at index 0 and values at index 1.
        """
        return not self.shared and self.key_width == self.value_width

    @property
    def parts(self) -> int:
        return 2 if self.equal else 1

    @property
    def numbers(self) -> int:
        """Return how many numbers of keys and values a row has."""
        return self.key_width + (0 if self.equal or self.shared else self.value_width)

    @property
    def row(self) -> int:
        """Return the size of the cache's last axis: how many elements of a head and position are stored side by side.

        They are the numbers of keys and values, and the scales.
        """
        if not self.per_token:
            return self.numbers
        return self.key_scale_offset + SCALE_BYTES * (1 if self.equal or self.shared else 2)

    @property
    def key_scale_offset(self) -> int:
        """Return the distance in memory from the start of a key to its scale, in bytes."""
        return -(-self.numbers // SCALE_BYTES) * SCALE_BYTES

    def value_scale_offset(self, page: int, kv_heads: int) -> int:
        """Return the distance in memory from the start of a key to the scale of its value, in bytes.

        A page has `page` positions and `kv_heads` heads.
        """
        if self.equal:
            return self.value_offset(page, kv_heads) + self.key_scale_offset
        return self.key_scale_offset + (0 if self.shared else SCALE_BYTES)

    def shape(self, page: Any, kv_heads: Any) -> tuple[Any, ...]:
        """Return the shape of a cache, with the symbol "pages" as its first size. A page has `page` positions."""
        return ("pages", self.parts, page, kv_heads, self.row)

    def value_offset(self, page: int, kv_heads: int) -> int:
        """Return the distance in memory from a key to its value, in elements.

        It is 0 if the value is a part of the key. A page has `page` positions and `kv_heads` heads.
        """
        if self.equal:
            return page * kv_heads * self.row
        return 0 if self.shared else self.key_width

    def keys(self, kv: "torch.Tensor") -> "torch.Tensor":
        """View the keys [pages, page, kv_heads, key_width] of the cache `kv` or of some of its pages."""
        return kv[:, 0, :, :, : self.key_width]

    def values(self, kv: "torch.Tensor") -> "torch.Tensor":
        """View the values [pages, page, kv_heads, value_width] of the cache `kv` or of some of its pages."""
        if self.equal:
            return kv[:, 1, :, :, : self.value_width]
        first = 0 if self.shared else self.key_width
        return kv[:, 0, :, :, first : first + self.value_width]

    def key_scales(self, kv: "torch.Tensor") -> "torch.Tensor":
        """View the scales f32[pages, page, kv_heads] of keys in the cache `kv` with scales per token."""
        import torch

        return kv.view(torch.float32)[:, 0, :, :, self.key_scale_offset // SCALE_BYTES]

    def value_scales(self, kv: "torch.Tensor") -> "torch.Tensor":
        """View the scales f32[pages, page, kv_heads] of values in the cache `kv` with scales per token.

        If values are a part of the keys, they have the scales of keys.
        """
        import torch

        place = self.key_scale_offset // SCALE_BYTES + (0 if self.equal or self.shared else 1)
        return kv.view(torch.float32)[:, 1 if self.equal else 0, :, :, place]
