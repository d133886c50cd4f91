import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from ingot.ir.errors import ArtifactError, RequestError
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.detokenizer import Detokenizer, TokenDecoder
from ingot.runtime.text.stop_strings import StopMatcher, StopStrings
from ingot.runtime.text.tokenizer import Tokenizer

VOCAB = 303
ids = st.lists(st.integers(0, VOCAB), max_size=60)  # one id beyond the vocabulary


def increments(tokenizer, token_ids, context=(), **options):
    decoder = TokenDecoder(tokenizer, context, **options)
    return [decoder.push(token) for token in token_ids] + [decoder.finish()]


def feed(tokenizer, token_ids, **params):
    """Streamed texts after each token and at the end; the detokenizer."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params), [])
    texts = []
    for token in token_ids:
        detokenizer.push(token)
        texts.append(detokenizer.text)
        if detokenizer.matched is not None:
            break
    detokenizer.finish()
    return [*texts, detokenizer.text], detokenizer


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """Ids of single-byte tokens: the byte-level alphabet maps byte b to a printable character."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    character = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [tokenizer.backend.token_to_id(character[byte]) for byte in data]


@settings(max_examples=300, deadline=None)
@given(token_ids=ids, skip=st.booleans())
def test_increments_are_the_whole_text(tokenizer, token_ids, skip):
    assert "".join(increments(tokenizer, token_ids, skip_special_tokens=skip)) == tokenizer.decode(token_ids, skip)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_increments_of_arbitrary_bytes(tokenizer, data):
    text = "".join(increments(tokenizer, byte_ids(tokenizer, data)))
    assert text == data.decode("utf-8", errors="replace")


@settings(max_examples=300, deadline=None)
@given(data=st.lists(st.sampled_from([b"\xff", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"a"]), max_size=80))
def test_increments_of_long_runs_of_broken_bytes(tokenizer, data):
    whole = b"".join(data)
    assert "".join(increments(tokenizer, byte_ids(tokenizer, whole))) == whole.decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 60))
def test_after_a_prompt(tokenizer, text, cut):
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    before = tokenizer.decode(prompt)
    got = "".join(increments(tokenizer, output, context=prompt))
    if before.endswith("\ufffd"):
        assert got == tokenizer.decode(output)
    else:
        assert before + got == tokenizer.decode(token_ids)


def test_an_incomplete_character_is_held_back_and_flushed(tokenizer):
    assert increments(tokenizer, byte_ids(tokenizer, "é🙂".encode())) == ["", "é", "", "", "", "🙂", ""]
    assert increments(tokenizer, byte_ids(tokenizer, "a🙂".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_special_and_added_tokens(tokenizer):
    sep, added, a = (tokenizer.backend.token_to_id(token) for token in ("<sep>", "[x]", "a"))
    assert increments(tokenizer, [a, sep, added, sep, a]) == ["a", "", "[x]", "", "a", ""]
    assert increments(tokenizer, [a, sep, sep, a], skip_special_tokens=False) == ["a", "<sep>", "<sep>", "a", ""]


def test_spaces_between_special_tokens():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))  # no decoder: tokens joined with spaces
    backend.add_special_tokens(["<s>", "<t>"])
    tokenizer = Tokenizer(backend)
    options = {"skip_special_tokens": False}
    assert (
        "".join(increments(tokenizer, [0, 1, 2, 0], **options))
        == "a <s> <t> a"
        == tokenizer.decode([0, 1, 2, 0], False)
    )
    joined = increments(tokenizer, [0, 1, 2, 0], spaces_between_special_tokens=False, **options)
    assert "".join(joined) == "a <s><t> a"


def test_byte_fallback_gives_characters_as_they_complete():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    text = "日本語🙂"
    assert [piece for piece in increments(tokenizer, list(text.encode())) if piece] == list(text)
    assert "".join(increments(tokenizer, [256, 256], context=[256])) == " a a"  # the space survives after a prompt
    broken = increments(tokenizer, [255] * 200)
    assert "".join(broken) == tokenizer.decode([255] * 200) and broken[-1] != broken[0]


@pytest.mark.parametrize("data", [b"\xff" * 4000, b"\xe2\x82" * 2000, b"\x80" * 4000, "é".encode() * 2000])
def test_time_is_linear(tokenizer, data):
    token_ids = byte_ids(tokenizer, data)
    decoder = TokenDecoder(tokenizer)
    longest, text = 0, ""
    start = time.perf_counter()
    for token in token_ids:
        text += decoder.push(token)
        longest = max(longest, len(decoder._pending) + len(decoder._context))
    assert longest <= 20 and time.perf_counter() - start < 5
    assert text + decoder.finish() == data.decode("utf-8", errors="replace")


def test_invisible_tokens_cost_nothing(tokenizer):
    sep = tokenizer.backend.token_to_id("<sep>")
    decoder = TokenDecoder(tokenizer)
    assert [decoder.push(token) for token in [sep, 10_000] * 500] == [""] * 1000 and not decoder._pending


# Stop strings.


def stop_by_definition(text, stops, include):
    """The stop string complete first, of those the longest: what StopMatcher says, found the slow way."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_by_definition(pieces, stops, include):
    matcher = StopMatcher(StopStrings(stops), include)
    whole = "".join(pieces)
    text, stop = stop_by_definition(whole, stops, include)
    given_out, arrived = "", ""
    for piece in pieces:
        given_out += matcher.push(piece)
        arrived += piece
        assert text.startswith(given_out), "part of a stop string was given out"
        if matcher.matched is None and not include:  # nothing is held back that cannot become a stop string
            assert any(other.startswith(arrived[len(given_out) :]) for other in stops)
    assert (given_out + matcher.finish(), matcher.matched) == (text, stop)


def test_a_stop_string_over_several_tokens(tokenizer):
    token_ids = byte_ids(tokenizer, b"one two END three")
    texts, detokenizer = feed(tokenizer, token_ids, stop=["END", "ENX"])
    assert detokenizer.matched == "END" and texts[-1] == "one two " and len(texts) == len("one two END") + 1
    assert all("E" not in text for text in texts)
    texts, detokenizer = feed(tokenizer, token_ids, stop="END", include_stop_str_in_output=True)
    assert detokenizer.matched == "END" and texts[-1] == "one two END"


def test_held_text_comes_when_it_is_no_stop_string(tokenizer):
    texts, detokenizer = feed(tokenizer, byte_ids(tokenizer, b"aENbEN"), stop="END")
    assert texts == ["a", "a", "a", "aENb", "aENb", "aENb", "aENbEN"] and detokenizer.matched is None


def test_a_stop_string_inside_a_token(tokenizer):
    (token,) = tokenizer.encode("Katze")[-1:]
    whole = tokenizer.decode([token])
    texts, _ = feed(tokenizer, [token], stop=whole[-1])
    assert texts[-1] == whole[:-1]


def test_text_after_a_match_is_dropped(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="b"), [])
    for token in byte_ids(tokenizer, b"abc"):
        detokenizer.push(token)
    detokenizer.finish()
    assert detokenizer.text == "a"


def test_a_stop_string_that_is_a_split_character(tokenizer):
    texts, detokenizer = feed(tokenizer, byte_ids(tokenizer, "x🙂y".encode()), stop="🙂")
    assert texts[-1] == "x" and detokenizer.matched == "🙂"


def test_long_stop_strings_are_linear():
    matcher = StopMatcher(StopStrings(["a" * 20_000 + "b"]), include=False)
    start = time.perf_counter()
    assert "".join(matcher.push("aaaa") for _ in range(10_000)) == "a" * 20_000
    assert time.perf_counter() - start < 5


# The tokenizer's files.


@pytest.fixture
def folder(tmp_path, byte_level):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_end_tokens_come_from_all_files(folder):
    assert Tokenizer.load(folder).eos_token_ids == frozenset()
    assert Tokenizer.load(folder, eos_fallback=7).eos_token_ids == {7}
    assert Tokenizer.load(folder, eos_fallback=[7, 8]).eos_token_ids == {7, 8}
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "<eos>"}, "bos_token": "<sep>"})
    loaded = Tokenizer.load(folder, eos_fallback=7)
    assert loaded.eos_token_ids == {0, 7} and loaded.bos_token_id == 1
    write(folder, "generation_config.json", {"eos_token_id": [5, 6]})
    assert Tokenizer.load(folder, eos_fallback=7).eos_token_ids == {0, 5, 6}
    write(folder, "generation_config.json", {"eos_token_id": 5})
    assert Tokenizer.load(folder).eos_token_ids == {0, 5}


def test_begin_and_end_tokens_of_prompts(folder):
    plain = Tokenizer.load(folder).encode("the cat")
    write(folder, "tokenizer_config.json", {"bos_token": "<sep>", "eos_token": "<eos>", "add_bos_token": True})
    assert Tokenizer.load(folder).encode("the cat") == [1, *plain]
    write(folder, "tokenizer_config.json", {"bos_token": "<sep>", "eos_token": "<eos>", "add_eos_token": True})
    assert Tokenizer.load(folder).encode("the cat") == [*plain, 0]
    write(folder, "tokenizer_config.json", {"bos_token": "<sep>", "add_bos_token": False})
    assert Tokenizer.load(folder).encode("the cat") == plain


def test_special_tokens_in_a_prompt_are_parsed(tokenizer):
    assert tokenizer.encode("a<eos>")[-1:] == [0]


def test_truncation_and_padding_of_the_checkpoint_are_off(tmp_path, byte_level):
    copy = tokenizers.Tokenizer.from_str(byte_level.to_str())
    copy.enable_truncation(2)
    copy.enable_padding(length=50)
    copy.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("the cat und") == byte_level.encode("the cat und").ids


def test_lone_surrogates(tokenizer):
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", "[1]", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "a JSON list"),
        ("tokenizer_config.json", '{"add_bos_token": true, "bos_token": "<none>"}', "bos_token"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("generation_config.json", "[" * 100_000, "not JSON"),
    ],
)
def test_damaged_files_are_named(folder, name, content, match):
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError, match=match) as caught:
        Tokenizer.load(folder)
    assert name in caught.value.where


def test_no_tokenizer(tmp_path):
    with pytest.raises(ArtifactError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_byte_level_token_is_decoded_once(byte_level, monkeypatch):
    tokenizer, asked = Tokenizer(byte_level), []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, *args, **kw: asked.append(ids) or decode(self, ids))
    ids = tokenizer.encode("the cat und die Katze, the end") * 20
    detokenizer = Detokenizer(tokenizer, SamplingParams(), [])
    for token in ids:
        detokenizer.push(token)
    assert detokenizer.text == "the cat und die Katze, the end" * 20 and len(asked) <= len(set(ids)) + 1


def test_only_byte_level_tokens_have_a_text_of_their_own(tokenizer, byte_level):
    clean = byte_level.token_to_id("a")
    (broken,) = byte_ids(tokenizer, b"\xe2")
    assert tokenizer.text_of(clean, True) == "a" and tokenizer.text_of(broken, True) is None
    special = byte_level.token_to_id("<sep>")
    assert (tokenizer.text_of(special, True), tokenizer.text_of(special, False)) == ("", "<sep>")
    other = tokenizers.Tokenizer.from_str(byte_level.to_str())
    other.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Tokenizer(other).text_of(clean, True) is None


def test_texts_side_by_side_are_those_one_by_one(byte_level, tokenizer):
    texts = ["the cat", "", "a<eos>", "und die Katze, 日本語 🙂", " ", "the cat"]
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    assert (
        tokenizer.encode_all(texts) == [byte_level.encode(text).ids for text in texts]
        and tokenizer.encode_all([]) == []
    )
    with pytest.raises(RequestError, match="no valid Unicode"):
        tokenizer.encode_all(["fine", "a\ud800"])
