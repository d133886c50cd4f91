"""Calibration texts: how files are read and divided, and every bad one."""

from pathlib import Path

import pytest

from ingot.ir.errors import CalibrationError
from ingot.quantizing import texts as module
from ingot.quantizing.texts import BUILTIN, CalibrationText, read_documents, read_text


def read(path: Path | str, checkpoint: Path, vocab: int = 260, max_seq_len: int = 128) -> CalibrationText:
    return read_text(str(path), checkpoint, vocab, max_seq_len)


def test_a_text_file_is_cut_in_the_middle(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 300 + "y" * 300)
    found = read(tmp_path / "a.txt", checkpoint)
    assert [len(one) for one in found.sequences] == [len(one) for one in found.held_out] == [128, 128, 44]
    assert not set(found.sequences[0]) & set(found.held_out[0])
    assert found.name == "a.txt" and found.tokens == 300


def test_documents_go_to_the_half_with_fewer_tokens(checkpoint: Path, tmp_path: Path) -> None:
    lines = [f'{{"text": "{char * count}"}}' for char, count in (("a", 100), ("b", 30), ("c", 60), ("d", 90))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    found = read(tmp_path / "a.jsonl", checkpoint)
    assert [len(one) for one in found.sequences] == [100] and [len(one) for one in found.held_out] == [30, 60, 90]


def test_the_builtin_text_is_enough_for_wide_models(checkpoint: Path) -> None:
    found = read(BUILTIN, checkpoint, max_seq_len=2048)
    found.check(100_000)
    assert max(map(len, found.sequences)) == module.SEQUENCE
    assert sum(map(len, found.held_out)) <= module.MOST_HELD_OUT < found.tokens <= module.MOST_TOKENS


def test_the_digest_is_that_of_the_tokens(checkpoint: Path, tmp_path: Path) -> None:
    for name, content in (("a.txt", "some words"), ("b.txt", "some words"), ("c.txt", "some Words")):
        (tmp_path / name).write_text(content)
    a, b, c = (read(tmp_path / name, checkpoint).digest() for name in ("a.txt", "b.txt", "c.txt"))
    assert a == b != c


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b" \n\n", "empty"),
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b'{"text": ""}\n', "empty"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\nnot JSON\n', "not JSON"),
        ("a.jsonl", b'{"text": "fine"}\n{"prompt": "x"}\n', "no text"),
        ("a.jsonl", b'["x"]\n', "no text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "not JSON"),
    ],
)
def test_bad_texts(checkpoint: Path, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read(tmp_path / name, checkpoint)


def test_the_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n{"text": 3}\n')
    with pytest.raises(CalibrationError, match="line 3"):
        read_documents(tmp_path / "a.jsonl")


def test_a_missing_file_and_a_folder(tmp_path: Path, checkpoint: Path) -> None:
    for path in (tmp_path / "no", tmp_path):
        with pytest.raises(CalibrationError, match="cannot be read"):
            read(path, checkpoint)


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(CalibrationError, match="cannot be turned into tokens"):
        read(tmp_path / "a.txt", tmp_path)


def test_tokens_that_the_model_lacks(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(CalibrationError, match="the model has 50 tokens"):
        read(tmp_path / "a.txt", checkpoint, vocab=50)


def test_a_short_text_says_how_much_is_needed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    with pytest.raises(
        CalibrationError, match=r"(?s)5 tokens to calibrate with and 5.*at least 96 of each, so about 192"
    ):
        read(tmp_path / "a.txt", checkpoint).check(96)


def test_wide_linears_take_fewer_tokens(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x" * 1200)
    monkeypatch.setattr(module, "MOST_NUMBERS", 300 * 64)
    found = read(tmp_path / "a.txt", checkpoint)
    assert found.tokens == 600 and found.within(64).tokens == 256 and found.within(1 << 20).tokens == 128
    assert found.within(64).held_out == found.held_out
