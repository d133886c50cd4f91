"""What lowerings of attention and of its parts know of their tensors: how heads lie in q, k, v and in the cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.backends.triton.launches import Expr
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Value

# The widest head that kernels hold in registers (Gemma's).
WIDEST = 256


def power_of_two(size: int) -> int:
    """The least power of two that is no less: Triton's tiles have such sizes only."""
    return 1 << (size - 1).bit_length()


def static(value: Value, axis: int) -> int:
    """A size that is no dim."""
    size = value.type.shape[axis]
    assert isinstance(size, int), f"{value.type} along axis {axis}"
    return size


@dataclass(frozen=True)
class Cache:
    """How a cache [pages, 2, page, kv_heads, head_dim] lies in memory, in elements."""

    page: int
    kv_heads: int
    dim: int
    page_stride: int
    part_stride: int
    slot_stride: int

    def constants(self) -> Mapping[str, int]:
        return {
            "PAGE": self.page,
            "KV_HEADS": self.kv_heads,
            "PAGE_STRIDE": self.page_stride,
            "PART_STRIDE": self.part_stride,
            "SLOT_STRIDE": self.slot_stride,
        }


def cache_of(call: Call) -> Cache:
    kv = call.value("kv")
    page, kv_heads, dim = (static(kv, axis) for axis in (2, 3, 4))
    call.want(kv.type.shape[1] == 2, f"a cache whose values are not as wide as keys: {kv.type}")
    page_stride, part_stride, slot_stride, head_stride, step = kv.strides
    call.want((head_stride, step) == (dim, 1), f"the heads of the cache do not lie side by side: {kv.type}")
    return Cache(page, kv_heads, dim, page_stride, part_stride, slot_stride)


def strides_of(call: Call, *names: str) -> dict[str, int]:
    """Constants that say where tokens and heads of q, k or v [T, H, D] begin, as kernels name them."""
    call.want_dense_rows(*names)
    found = {}
    for name in names:
        found[f"{name.upper()}_TOKEN"], found[f"{name.upper()}_HEAD"], _ = call.value(name).strides
    return found


def dim_constants(call: Call, name: str) -> dict[str, int]:
    """The size of a head, and of the tile that holds it."""
    dim = static(call.value(name), 2)
    call.want(dim <= WIDEST, f"heads of {dim} elements, more than {WIDEST}")
    return {"DIM": dim, "BLOCK_DIM": power_of_two(dim)}


def want_one_dtype(call: Call, *names: str) -> None:
    """Refuse a call where these differ in dtype."""
    dtypes = {name: call.dtype_name(name) for name in names}
    call.want(len(set(dtypes.values())) == 1, "dtypes differ: " + ", ".join(f"{n} {d}" for n, d in dtypes.items()))


def tokens_of(call: Call, name: str) -> Expr:
    """T, of a tensor [T, …]."""
    return call.value(name).type.shape[0]
