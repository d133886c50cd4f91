"""The names of formats: registered ones such as "int8", and a text that spells out any other format.

The text is the element type, the levels of scales, and what else differs from a plain weight, separated by slashes:

    i4/1x128:bf16/low_first                      rows of four-bit integers, a bf16 scale for 128 of them
    u4/1x128:f16:zeros/low_first/ordered         with zero points, and columns in another order
    f4e2m1/1x16:f8e4m3/*x*:f32/low_first         two levels of scales
    f8e4m3/128x128:f32/x=f8e4m3:128              activations rounded in groups of 128
    i4/1x128:bf16/low_first/rotated_in=64        the input rotated in blocks of 64, the result as "rotated_out"

A block is ROWSxCOLUMNS, and "*" stands for all of them. The rule of activations follows "x=": its element type, the
group ("*": a token, "static": none), the dtype of scales if that is not f32, "stored", and "outliers", "bound" or
"factor" with a number.
"""

from dataclasses import replace
from functools import lru_cache

from ingot.ir.errors import InternalError, OptionError
from ingot.ir.formats.activations import Activations
from ingot.ir.formats.elements import SCALE_DTYPES
from ingot.ir.formats.format import KEPT, Format, Scales

FORMATS: dict[str, Format] = {}
# Other names of registered formats.
ALIASES: dict[str, str] = {}
# The numbers of a rule of activations, and those that are not spelled.
_NUMBERS = {"outliers": 0.0, "bound": 0.0, "factor": 1.0}
_ROTATIONS = ("rotated_in", "rotated_out")
_DTYPE_TEXT = {dtype: name for name, dtype in SCALE_DTYPES.items()}


def register_format(made: Format) -> Format:
    """Register a weight format by its name. Raises InternalError if the name is taken or a field is invalid."""
    problem = "is defined twice" if made.name in FORMATS or made.name in ALIASES else made.problem()
    if "/" in made.name:
        problem = "has a slash in its name"
    if problem:
        raise InternalError(f"the format '{made.name}' {problem}")
    FORMATS[made.name] = made
    return made


def register_alias(name: str, of: str) -> None:
    """Register another name of the format `of`. Raises InternalError if the name is taken or `of` is unknown."""
    if name in FORMATS or name in ALIASES or of not in FORMATS:
        raise InternalError(f"'{name}' cannot be another name of the format '{of}'")
    ALIASES[name] = of


def find_format(name: str) -> Format:
    """Return the weight format with this name, registered or spelled out. Raises OptionError if it is unknown."""
    found = FORMATS.get(ALIASES.get(name, name))
    if found is None:
        found = _parse(name) if "/" in name else None
    if found is None:
        raise OptionError(f"unknown weight format '{name}'", expected=", ".join(FORMATS))
    return found


def format_of(
    element: str,
    levels: tuple[Scales, ...] = (),
    activations: Activations | None = None,
    packing: str = "plain",
    ordered: bool = False,
    rotated_in: int = 0,
    rotated_out: int = 0,
) -> Format:
    """Return the format with these fields. It has the name of an equal registered format, or else its spelled text.

    Raises InternalError if the fields do not define a format.
    """
    return named(Format("", element, levels, activations, packing, ordered, rotated_in, rotated_out))


def named(made: Format) -> Format:
    """Return the format with the name of an equal registered format, or else with its spelled text.

    Raises InternalError if the fields do not define a format.
    """
    made = replace(made, name="")
    for one in FORMATS.values():
        if replace(one, name="") == made:
            return one
    made = replace(made, name=_spell(made))
    if problem := made.problem():
        raise InternalError(f"the format '{made.name}' {problem}")
    return made


def _spell(made: Format) -> str:
    words = [made.element]
    for level in made.levels:
        flags = [name for name in ("zeros", "offsets") if getattr(level, name)]
        words.append(":".join([f"{_count(level.rows)}x{_count(level.columns)}", _DTYPE_TEXT[level.dtype], *flags]))
    if made.packing != "plain":
        words.append(made.packing)
    if made.ordered:
        words.append("ordered")
    words += [f"{name}={size}" for name in _ROTATIONS if (size := getattr(made, name))]
    if (rule := made.activations) is not None:
        parts = [rule.element, _count(rule.columns) if rule.dynamic else "static"]
        parts += [_DTYPE_TEXT[rule.scales]] if rule.scales is not SCALE_DTYPES["f32"] else []
        parts += ["stored"] if rule.stored and rule.dynamic else []
        parts += [f"{name}{getattr(rule, name)!r}" for name, usual in _NUMBERS.items() if getattr(rule, name) != usual]
        words.append("x=" + ":".join(parts))
    return "/".join(words) if len(words) > 1 else f"{made.element}/"


@lru_cache(maxsize=256)
def _parse(name: str) -> Format | None:
    """Return the format that `name` spells out; None if it spells none, or if a registered format is equal."""
    element, *words = name.split("/")
    fields = Format("", element)
    try:
        for word in filter(None, words):
            if word == "ordered":
                fields = replace(fields, ordered=True)
            elif word.partition("=")[0] == "rotated_in":
                fields = replace(fields, rotated_in=_number(word.partition("=")[2]))
            elif word.partition("=")[0] == "rotated_out":
                fields = replace(fields, rotated_out=_number(word.partition("=")[2]))
            elif word.startswith("x="):
                fields = replace(fields, activations=_parse_activations(word[2:]))
            elif ":" in word:
                fields = replace(fields, levels=(*fields.levels, _parse_level(word)))
            else:
                fields = replace(fields, packing=word)
    except (KeyError, ValueError):
        return None
    if fields.problem() is not None or (element == KEPT and fields.lossless and fields.packing == "plain"):
        return None
    # One format has one text, so that equal formats have equal names.
    return replace(fields, name=name) if _spell(fields) == name and named(fields).name == name else None


def _parse_level(text: str) -> Scales:
    block, dtype, *flags = text.split(":")
    rows, _, columns = block.partition("x")
    if not set(flags) <= {"zeros", "offsets"}:
        raise ValueError(text)
    return Scales(_number(rows), _number(columns), "zeros" in flags, SCALE_DTYPES[dtype], offsets="offsets" in flags)


def _parse_activations(text: str) -> Activations:
    element, group, *rest = text.split(":")
    made = Activations(element, dynamic=group != "static", stored=group == "static")
    if made.dynamic:
        made = replace(made, columns=_number(group))
    for word in rest:
        if word == "stored":
            made = replace(made, stored=True)
        elif name := next((name for name in _NUMBERS if word.startswith(name)), None):
            made = _with_number(made, name, float(word.removeprefix(name)))
        else:
            made = replace(made, scales=SCALE_DTYPES[word])
    return made


def _with_number(rule: Activations, name: str, number: float) -> Activations:
    match name:
        case "outliers":
            return replace(rule, outliers=number)
        case "bound":
            return replace(rule, bound=number)
    return replace(rule, factor=number)


def _count(value: int) -> str:
    return str(value) if value else "*"


def _number(text: str) -> int:
    value = 0 if text == "*" else int(text)
    if value < 0 or (text != "*" and value == 0):
        raise ValueError(text)
    return value
