"""Where in a rendering the messages are."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ingot.runtime.chat.spans import content_spans, disguise


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.text()), max_size=8))
def test_spans_are_where_the_messages_are(parts: list[tuple[bool, str]]) -> None:
    text = "".join(part for _, part in parts)
    assume(not any(part != disguise(part) and not said for said, part in parts if part[:1] >= "\U000f0000"))
    spans = content_spans(text, "".join(disguise(part) if said else part for said, part in parts))
    assert spans is not None
    inside = {place for begin, end in spans for place in range(begin, end)}
    said = [from_message for from_message, part in parts for _ in part]
    for place, char in enumerate(text):
        assert (place in inside) == (said[place] and disguise(char) != char)


def test_renderings_that_differ_have_no_spans() -> None:
    for text, other in (("ab", "a"), ("ab", "ac"), ("ab", "a" + disguise("c")), ("a🙂", "b" + disguise("🙂"))):
        assert content_spans(text, other) is None
