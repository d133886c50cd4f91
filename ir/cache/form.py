"""The form of a KV cache: the widths of keys and values, and their place in a page.

A cache is [pages, parts, page, kv_heads, row]. There are three forms:

equal widths    [pages, 2, page, kv_heads, width]: keys at index 0 of the second axis, values at 1
two widths      [pages, 1, page, kv_heads, key_width + value_width]: a row is a key and then its value
shared          [pages, 1, page, kv_heads, key_width]: a row is a key, and its first numbers are the value

The shared form is the latent cache of multi-head latent attention (arXiv 2405.04434), in which all heads of q read one
row per token. The second axis tells equal widths from the other two forms; the width of q tells those apart. In every
form axis 2 holds the positions of a page and axis 3 the heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ingot.ir.errors import VerifyError

if TYPE_CHECKING:  # so that `--help` does not import torch
    import torch


class Shaped(Protocol):
    """A tensor, or the type of one."""

    @property
    def shape(self) -> Any: ...


@dataclass(frozen=True)
class CacheForm:
    """The numbers of a key and of a value per head and position. `shared`: a value is the first numbers of its key."""

    key_width: int
    value_width: int
    shared: bool = False

    def __post_init__(self) -> None:
        most = self.key_width if self.shared else self.value_width
        if not 0 < self.value_width <= most:
            raise VerifyError(
                f"values of {self.value_width} numbers with keys of {self.key_width}",
                expected=f"a value_width of 1 to {self.key_width}, where values are the first numbers of keys"
                if self.shared
                else "at least one number",
            )

    @staticmethod
    def given(q: Shaped, k: Shaped, v: Shaped | None, value_width: int | None) -> "CacheForm":
        """Return the form for attention of q [T, H, D] over k and v. Raises VerifyError if these do not fit
        together."""
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
    def of(k: Shaped, v: Shaped | None, value_width: int | None = None) -> "CacheForm":
        """Return the form that holds rows of k [T, KV, D] and v. If v is None, values are part of the keys; a write of
        such keys needs no `value_width`."""
        if v is None:
            return CacheForm(k.shape[2], k.shape[2] if value_width is None else value_width, shared=True)
        return CacheForm(k.shape[2], v.shape[2])

    @staticmethod
    def of_cache(shape: Sequence[Any], key_width: Any, value_width: int | None) -> "CacheForm":
        """Return the form of a cache from its shape, the width of q and the `value_width` of the op that reads it.
        Raises VerifyError if the shape fits no form."""
        if value_width is not None:
            form = CacheForm(key_width, value_width, shared=True)
        elif len(shape) == 5 and shape[1] == 1 and shape[4] > key_width:
            form = CacheForm(key_width, shape[4] - key_width)
        else:
            form = CacheForm(key_width, key_width)
        form.check(shape)
        return form

    @staticmethod
    def check_equal(kv: Shaped, k: Shaped, v: Shaped) -> None:
        """Raise VerifyError for a cache that the fused ops cannot write: one with keys and values of different
        widths."""
        form = CacheForm.of(k, v)
        if not form.equal:
            raise VerifyError(f"{form}", expected="keys and values of equal width, or kv_append")
        form.check(kv.shape)

    def check(self, shape: Sequence[Any]) -> None:
        """Raise VerifyError unless a cache of this shape has this form."""
        if len(shape) != 5 or (shape[1], shape[4]) != (self.parts, self.row):
            raise VerifyError(
                f"a cache {list(shape)} for {self}", expected=str(list(self.shape("page", "kv_heads"))).replace("'", "")
            )

    def __str__(self) -> str:
        if self.shared:
            return f"keys of {self.key_width} numbers, of which {self.value_width} are values"
        return f"keys of {self.key_width} numbers and values of {self.value_width}"

    @property
    def equal(self) -> bool:
        """Return whether values are stored apart from keys and are as wide."""
        return not self.shared and self.key_width == self.value_width

    @property
    def parts(self) -> int:
        return 2 if self.equal else 1

    @property
    def row(self) -> int:
        """Return the size of the last axis."""
        return self.key_width + (0 if self.equal or self.shared else self.value_width)

    def shape(self, page: Any, kv_heads: Any) -> tuple[Any, ...]:
        """Return the shape of a cache; its number of pages is the dim `pages`."""
        return ("pages", self.parts, page, kv_heads, self.row)

    def value_offset(self, page: int, kv_heads: int) -> int:
        """Return the distance in numbers from a key to its value."""
        if self.equal:
            return page * kv_heads * self.key_width
        return 0 if self.shared else self.key_width

    def keys(self, kv: "torch.Tensor") -> "torch.Tensor":
        """Return the keys [pages, page, kv_heads, key_width], a view of the cache or of some of its pages."""
        return kv[:, 0, :, :, : self.key_width]

    def values(self, kv: "torch.Tensor") -> "torch.Tensor":
        """Return the values [pages, page, kv_heads, value_width], a view like `keys`."""
        if self.equal:
            return kv[:, 1]
        first = 0 if self.shared else self.key_width
        return kv[:, 0, :, :, first : first + self.value_width]
