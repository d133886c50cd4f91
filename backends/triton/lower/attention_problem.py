"""The key of decode attention in the tuning log."""

from dataclasses import asdict, dataclass

from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.lower.problem import read_problem
from ingot.ir.artifact.tuning import Choice
from ingot.ir.cache.form import CacheForm
from ingot.ir.errors import VerifyError
from ingot.ir.types import DTYPES

DECODE_ATTENTION = "decode_attention"
# The most tokens of a decode step if each sequence has one: with this many contexts, each can still have two splits.
MOST_DECODED = 512
# AUTO: a cache in the dtype of q, as `--kv-cache-dtype` spells it. EQUAL: a cache of equal widths.
AUTO, EQUAL = "auto", "equal"
_VALUES, _LATENT = "values", "latent"


@dataclass(frozen=True)
class DecodeProblem:
    """Attention of steps of up to `tokens` tokens over a cache of `kv_heads` heads of `dim` elements.

    A page has `page` positions, and `group` q heads share a kv head. With `append`, the same launch prepares q and k
    and writes k and v. `dtype` is the IR name of the dtype of q, k and v, `cache_dtype` that of the cache.

    `form` is "equal"; "values_N" for separate values of N elements; or "latent_N" if values are the first N elements of
    keys (`ingot.ir.cache.form`). `sharing` of the `kv_heads` groups read one cache head.
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
        """Return the problem of a choice. Raises TypeError or ValueError if it is not decode attention."""
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
        return DecodeTiles

    @property
    def cached_as(self) -> str:
        """Return the IR name of the cache's dtype."""
        return self.dtype if self.cache_dtype == AUTO else self.cache_dtype

    @property
    def cache_form(self) -> CacheForm:
        kind, _, width = self.form.partition("_")
        return CacheForm(self.dim, self.dim if kind == EQUAL else int(width), shared=kind == _LATENT)

    @property
    def cache_heads(self) -> int:
        return self.kv_heads // self.sharing

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the key of one position of one head."""
        return self.dim * DTYPES[self.cached_as].itemsize

    @property
    def position_bytes(self) -> int:
        """Return the bytes of the keys and values of one position, over all cache heads."""
        form = self.cache_form
        return self.cache_heads * form.parts * form.row * DTYPES[self.cached_as].itemsize

    def fields(self) -> dict[str, bool | int | str]:
        return asdict(self)


def form_name(form: CacheForm) -> str:
    """Return the name of a cache's form in a problem."""
    if form.equal:
        return EQUAL
    return f"{_LATENT if form.shared else _VALUES}_{form.value_width}"
