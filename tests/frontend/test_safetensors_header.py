"""Damaged tensor files end in a CheckpointError only."""

import json
import random
import re
import struct
from pathlib import Path

import pytest
from checkpoint_files import some_tensors, write_checkpoint, write_raw
from safetensors.torch import load_file, save_file

from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.safetensors_header import read_header
from ingot.ir.errors import CheckpointError


@pytest.mark.parametrize("shards", [1, 2])
def test_truncation_at_fifty_offsets(tmp_path: Path, shards: int) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors(), shards)
    file = sorted(folder.glob("*.safetensors"))[-1]
    data = file.read_bytes()
    offsets = {round(i * (len(data) - 1) / 49) for i in range(50)}
    assert len(offsets) == 50
    for offset in offsets:
        file.write_bytes(data[:offset])
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(folder)
        assert file.name in str(caught.value)
        assert "expected:" in str(caught.value)
    file.write_bytes(data)
    Checkpoint.open(folder)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED_HEADERS: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"{nonsense", b"", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not UTF-8"),
    "UTF-16": ('{"x": 1}'.encode("utf-16"), b"", "not JSON|not UTF-8"),
    "empty header": (b"", b"", "not JSON"),
    "a list": ([], b"", "JSON object"),
    "too deep": (b"[" * 100_000, b"", "nested deeper"),
    "deep but parsable": (b'{"x": ' * 90 + b"1" + b"}" * 90, b"", "nested deeper"),
    "a number of 10000 digits": (b'{"x": ' + b"9" * 10_000 + b"}", b"", "not JSON"),
    "NaN": (b'{"x": NaN}', b"", "NaN"),
    "half a surrogate pair": (rb'{"\ud800": {}}', b"", "surrogate"),
    "duplicate tensor": (
        b'{"x": ' + json.dumps(GOOD).encode() + b', "x": ' + json.dumps(GOOD).encode() + b"}",
        bytes(8),
        "the key 'x' occurs twice",
    ),
    "duplicate field": (
        b'{"x": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}',
        bytes(8),
        "twice",
    ),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "metadata a list": ({"__metadata__": []}, b"", "__metadata__"),
    "entry a number": ({"x": 3}, b"", "tensor x"),
    "field missing": ({"x": {"dtype": "F32", "shape": [2]}}, bytes(8), "tensor x"),
    "field unknown": ({"x": GOOD | {"strides": [1]}}, bytes(8), "tensor x"),
    "dtype unknown": ({"x": GOOD | {"dtype": "F31"}}, bytes(8), "F31"),
    "dtype packed": ({"x": GOOD | {"dtype": "F4"}}, bytes(8), "F4"),
    "dtype a list": ({"x": GOOD | {"dtype": ["F32"]}}, bytes(8), "F32"),
    "shape a string": ({"x": GOOD | {"shape": "2"}}, bytes(8), "shape"),
    "shape of floats": ({"x": GOOD | {"shape": [2.0]}}, bytes(8), "shape"),
    "shape of booleans": ({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4), "shape"),
    "negative sizes": ({"x": GOOD | {"shape": [-1, -2]}}, bytes(8), "shape"),
    "65 dimensions": ({"x": GOOD | {"shape": [1] * 64 + [2]}}, bytes(8), "shape"),
    "shape beyond 64 bits": ({"x": GOOD | {"shape": [1 << 40, 1 << 40]}}, bytes(8), "shape"),
    "empty, strides beyond 64 bits": (
        {"x": {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}},
        b"",
        "shape",
    ),
    "offsets reversed": ({"x": GOOD | {"data_offsets": [8, 0]}}, bytes(8), "data_offsets"),
    "offsets negative": ({"x": GOOD | {"data_offsets": [-8, 0]}}, bytes(8), "data_offsets"),
    "offsets three": ({"x": GOOD | {"data_offsets": [0, 4, 8]}}, bytes(8), "data_offsets"),
    "offsets huge": ({"x": GOOD | {"data_offsets": [0, 1 << 70]}}, bytes(8), "data_offsets"),
    "too few bytes for the shape": ({"x": GOOD | {"data_offsets": [0, 4]}}, bytes(4), "8 bytes"),
    "too many bytes for the shape": ({"x": GOOD | {"data_offsets": [0, 12]}}, bytes(12), "8 bytes"),
    "overlap": ({"x": GOOD, "y": GOOD | {"data_offsets": [4, 12]}}, bytes(12), "tensor y.*(?s:.)*begin at byte"),
    "the same bytes twice": ({"x": GOOD, "y": GOOD}, bytes(8), "overlap"),
    "hole": ({"x": GOOD, "y": GOOD | {"data_offsets": [12, 20]}}, bytes(20), "hole"),
    "hole at the start": ({"x": GOOD | {"data_offsets": [4, 12]}}, bytes(12), "hole"),
    "bytes after the last": ({"x": GOOD}, bytes(9), "1 bytes follow"),
    "data out of range": ({"x": GOOD}, bytes(7), "truncated"),
}


@pytest.mark.parametrize("case", DAMAGED_HEADERS)
def test_damaged_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, data, message = DAMAGED_HEADERS[case]
    file = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    text = str(caught.value)
    assert re.search(message, text)
    assert str(file) in text
    assert len(text) < 2000
    # What the library refuses we must refuse; the reverse need not hold, but the undamaged header must pass in both.
    assert read_header(write_raw(file, {"x": GOOD}, bytes(8)))["x"].shape == (2,)


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1, 51, 9_999_999])
def test_header_lengths_are_checked_before_reading(tmp_path: Path, length: int) -> None:
    file = write_raw(tmp_path / "model.safetensors", b"{" + b" " * 49, b"", length=length)
    with pytest.raises(CheckpointError, match=f"the header (length is|needs) {length}"):
        read_header(file)


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 200_000_000))
        stream.truncate(300_000_000)  # sparse: the length alone is what is wrong
    with pytest.raises(CheckpointError, match="at most 100000000 bytes"):
        read_header(file)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(file)


def test_random_edits_end_in_a_checkpoint_error_or_in_what_the_library_reads(tmp_path: Path) -> None:
    random_source = random.Random(0)
    file = tmp_path / "model.safetensors"
    save_file(some_tensors(), file)
    original = file.read_bytes()
    header_end = 8 + struct.unpack("<Q", original[:8])[0]
    refused = 0
    for _ in range(1500):
        data = bytearray(original)
        for _ in range(random_source.choice((1, 1, 1, 2, 5))):
            position = random_source.randrange(header_end)
            match random_source.randrange(4):
                case 0:
                    data[position] = random_source.randrange(256)
                case 1:
                    data[position] = random_source.choice(b'0123456789-{}[]",:\\e.')
                case 2:
                    del data[position]
                case _:
                    data.insert(position, random_source.choice(b'0123456789-{}[]",:\\e. '))
        file.write_bytes(data)
        try:
            tensors = read_header(file)
        except CheckpointError:
            refused += 1
            continue
        theirs = load_file(file)  # raises, and fails the test, for what the library would not accept
        assert {name: info.shape for name, info in tensors.items()} == {n: tuple(t.shape) for n, t in theirs.items()}
    assert refused > 1000
