"""The description of a decode attention in the tuning log, by which its tile sizes are stored and found."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.lower.problem import read_problem
from ingot.ir.artifact.tuning import Choice
from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import VerifyError
from ingot.ir.types import DTYPES

DECODE_ATTENTION = "decode_attention"
# The most tokens of a step of the decode kernel if each sequence has one. With this many contexts, each can still have
# two splits.
MOST_DECODED = 512
# AUTO: a cache in the dtype of q, as in `--kv-cache-dtype auto`. EQUAL: a cache with keys and values of one width.
AUTO, EQUAL = "auto", "equal"
_VALUES, _LATENT = "values", "latent"
# At the end of a form: the cache has scales per token.
_PER_TOKEN = "_per_token"


@dataclass(frozen=True)
class DecodeProblem:
    """The properties of a decode attention that its tile sizes depend on.

    - `tokens`: the most tokens of a step
    - `kv_heads`, `dim`: the number of k/v heads, and the elements of a head
    - `group`: how many q heads share a k/v head
    - `page`: the positions of a page
    - `append`: the launch also norms and rotates q and k, and writes k and v
    - `dtype`: the IR name of the dtype of q, k and v, such as "bf16"
    - `cache_dtype`: the IR name of the dtype of the cache, or "auto" if it is `dtype`
    - `form`: "equal" if keys and values have one width. "values_N" if values have N elements. "latent_N" if values are
      the first N elements of keys. It ends in "_per_token" if the cache has scales per token
    - `sharing`: how many adjacent k/v heads read one head of the cache
    """

    kv_heads: int
    group: int
    dim: int
    page: int
    dtype: str
    tokens: int
    append: bool
    cache_dtype: str = AUTO
    form: str = EQUAL
    sharing: int = 1

    @staticmethod
    def of(choice: Choice) -> "DecodeProblem":
        """Return the decode attention for which `choice`, an entry of the tuning log, records tile sizes.

        Raises TypeError or ValueError if the entry does not describe a decode attention.
        """
        problem = read_problem(DecodeProblem, choice)
        if problem.tokens > MOST_DECODED or not {problem.dtype, problem.cached_as} <= DTYPES.keys():
            raise ValueError(f"{problem.tokens} tokens of {problem.dtype} over {problem.cached_as}")
        if problem.kv_heads % problem.sharing:
            raise ValueError(f"sharing is {problem.sharing}, which does not divide kv_heads, {problem.kv_heads}")
        try:
            named = form_name(problem.cache_form)
        except (ValueError, VerifyError):
            named = ""
        if named != problem.form:
            raise ValueError(f"form is {problem.form!r}")
        return problem

    @property
    def tiles_kind(self) -> type[DecodeTiles]:
        """Return the dataclass that holds the tile sizes of the decode kernel."""
        return DecodeTiles

    @property
    def cached_as(self) -> str:
        """Return the IR name of the dtype of the KV cache, such as "bf16" or "f8e4m3"."""
        return self.dtype if self.cache_dtype == AUTO else self.cache_dtype

    @property
    def cache_form(self) -> CacheForm:
        """Return how the cache stores keys and values: their widths, and whether a value is part of its key."""
        kind, _, width = self.form.removesuffix(_PER_TOKEN).partition("_")
        per_token = self.form.endswith(_PER_TOKEN)
        return CacheForm(
            self.dim, self.dim if kind == EQUAL else int(width), shared=kind == _LATENT, per_token=per_token
        )

    @property
    def cache_heads(self) -> int:
        """Return the number of heads in the KV cache. It is below `kv_heads` if adjacent k/v heads share one."""
        return self.kv_heads // self.sharing

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the key of one position and one head, without its scale."""
        return self.dim * DTYPES[self.cached_as].itemsize

    @property
    def position_bytes(self) -> int:
        """Return the bytes of the keys and values of one position, over all cache heads."""
        form = self.cache_form
        return self.cache_heads * form.parts * form.row * DTYPES[self.cached_as].itemsize

    def fields(self) -> dict[str, bool | int | str]:
        return asdict(self)


def form_name(form: CacheForm) -> str:
    """Return the name of a cache form (widths of keys and values) in the tuning log: equal, values_N or latent_N.

    N is the number of elements of a value. With "latent_N", a value is the first N elements of its key. The name of a
    form with scales per token ends in "_per_token".
    """
    name = EQUAL if form.equal else f"{_LATENT if form.shared else _VALUES}_{form.value_width}"
    return name + (_PER_TOKEN if form.per_token else "")
