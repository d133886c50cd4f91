"""Bar charts as SVG text: one bar per engine in each group; shorter is better."""

from collections.abc import Mapping, Sequence
from html import escape

# Colours that readers with any colour vision can tell apart (Okabe and Ito, "Color Universal Design", 2008).
_COLOURS = ("#0072b2", "#e69f00", "#999999", "#009e73", "#cc79a7")
_BAR, _GAP, _GROUP = 22, 4, 18  # heights in pixels: a bar, the space below it, the space below a group
_LABEL, _WIDTH, _VALUE = 190, 720, 80  # widths in pixels: of the names, of the whole, of the numbers after bars
_FONT = "font-family='system-ui, sans-serif' font-size='13'"


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float, str]]]) -> str:
    """Return an SVG of `groups` by heading; each bar is (name, value, the value as text).

    Equal names share a colour. The longest bar of each group takes the whole width, as groups differ by orders of
    magnitude.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name, _, _ in group))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    room = _WIDTH - _LABEL - _VALUE
    lines = []
    y = 44
    for heading, group in groups.items():
        lines.append(_text(12, y + 4, heading, "font-weight='600'"))
        y += 14
        longest = max(value for _, value, _ in group)
        for name, value, shown in group:
            width = max(1.0, room * value / longest)
            middle = y + _BAR / 2 + 5
            lines.append(_text(_LABEL - 8, middle, name, "text-anchor='end'"))
            lines.append(f"<rect x='{_LABEL}' y='{y}' width='{width:.1f}' height='{_BAR}' fill='{colours[name]}'/>")
            lines.append(_text(_LABEL + width + 6, middle, shown))
            y += _BAR + _GAP
        y += _GROUP
    height = y
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' role='img' {_FONT}>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{_WIDTH}' height='{height}' rx='6' fill='#ffffff'/>",
            _text(12, 22, title, "font-weight='700'"),
            *lines,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='#222222' {more}>{escape(text)}</text>".replace(" >", ">")
