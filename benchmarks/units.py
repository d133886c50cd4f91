"""Format numbers with their units as text: 0.00075 s is 750 µs."""

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_PREFIXED = ("s", "B", "B/s", "flop", "flop/s")
_SECONDS_FROM = 1.0  # longer times have no prefix


def quantity(value: float, unit: str) -> str:
    """Return a number with its unit as text, such as "750 µs". It has three significant digits.

    Units in _PREFIXED get a decimal prefix, such as "µs" for "s". The unit "" is for ratios and counts.
    """
    if unit == "tokens/s":
        return f"{value:,.0f} {unit}"
    if unit == "" and value.is_integer():
        return f"{value:,.0f}"  # a count
    if unit not in _PREFIXED:
        return _digits(value) + (f" {unit}" if unit else "")
    if value == 0 or (unit == "s" and abs(value) >= _SECONDS_FROM) or (unit != "s" and abs(value) < _PREFIXES[4][0]):
        return f"{_digits(value)} {unit}"
    scale, prefix = next((one for one in _PREFIXES if float(_digits(abs(value) / one[0])) >= 1), _PREFIXES[-1])
    return f"{_digits(value / scale)} {prefix}{unit}"


def _digits(value: float) -> str:
    """Return a number as text with three significant digits. Numbers from 100 on are rounded to whole numbers."""
    if abs(value) >= 100 or value == 0:
        return f"{value:.0f}"
    text = f"{value:#.3g}"
    return f"{value:.2f}" if "e" in text else text.removesuffix(".")
