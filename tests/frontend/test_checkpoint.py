"""Opening checkpoints: good ones give what the safetensors library gives, bad ones end in an IngotError only."""

import json
import random
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ingot.frontend.checkpoint import Checkpoint, check_totality
from ingot.frontend.safetensors_header import DTYPES, read_header
from ingot.ir import digest as digest_module
from ingot.ir.errors import CheckpointError, ConfigError


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5),
        "b.weight": torch.randn(4, 2).bfloat16(),
        "c.flags": torch.tensor([True, False, True]),
        "d.scalar": torch.tensor(7, dtype=torch.int64),
        "e.empty": torch.empty(0, 4, dtype=torch.float16),
    }


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_raw(file: Path, header: object, data: bytes, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_equal_the_librarys(tmp_path: Path, shards: int) -> None:
    tensors = some_tensors()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tensors, shards))
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]}
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info, read = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_reads_as_the_library_reads_it(tmp_path: Path, code: str) -> None:
    data = bytes(range(1, 33)) if code != "BOOL" else bytes([0, 1] * 16)
    count = 32 // DTYPES[code].itemsize
    header = {"x": {"dtype": code, "shape": [2, count // 2], "data_offsets": [0, 32]}}
    (tmp_path / "config.json").write_text("{}")
    file = write_raw(tmp_path / "model.safetensors", header, data)
    read = Checkpoint.open(tmp_path).read("x")
    assert read.shape == (2, count // 2)
    try:
        theirs = load_file(file)["x"]
    except SafetensorError:
        pytest.skip(f"this version of the library does not know {code}")
    assert read.dtype == theirs.dtype
    assert torch.equal(read.view(torch.uint8), theirs.view(torch.uint8))


def test_read_maps_the_file_and_never_writes_to_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", {"x": torch.arange(1024.0), "y": torch.ones(1024)})
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = Checkpoint.open(folder)
    first, again = checkpoint.read("x"), checkpoint.read("x")
    assert first.data_ptr() == again.data_ptr()  # the same pages, so nothing was copied
    first.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.arange(4.0)
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": [4], "data_offsets": [3, 19]},
    }
    (tmp_path / "config.json").write_text("{}")
    write_raw(tmp_path / "model.safetensors", header, b"\x01\x02\x03" + values.numpy().tobytes())
    read = Checkpoint.open(tmp_path).read("x")
    assert torch.equal(read, values)
    assert read.data_ptr() % 4 == 0


def test_read_refuses_unknown_names_and_files_that_shrank(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        checkpoint.read("nothing")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="shrank"):
        checkpoint.read("a.weight")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        checkpoint.read("a.weight")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.digests()


def test_digests_see_every_byte_by_file_and_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "CHUNK_BYTES", 64)  # many chunks in a small file
    one = Checkpoint.open(write_checkpoint(tmp_path / "one", some_tensors(), 2))
    two = Checkpoint.open(write_checkpoint(tmp_path / "two", some_tensors(), 2))
    assert one.digests() == two.digests() == one.digests(threads=1)
    shard = tmp_path / "two" / "model-00002-of-00002.safetensors"
    original = shard.read_bytes()
    for position in (len(original) - 1, original.index(b"F")):
        data = bytearray(original)
        data[position] ^= 1
        shard.write_bytes(data)
        mine, theirs = one.digests(), two.digests()
        assert (
            mine.keys() == theirs.keys()
            and mine["model-00001-of-00002.safetensors"] == theirs["model-00001-of-00002.safetensors"]
        )
        pairs = zip(mine[shard.name], theirs[shard.name], strict=True)
        assert [index for index, pair in enumerate(pairs) if pair[0] != pair[1]] == [position // 64]
    renamed = {"one": tmp_path / "one" / "model-00001-of-00002.safetensors", "to": tmp_path / "one" / "zz.safetensors"}
    renamed["one"].rename(renamed["to"])
    index = tmp_path / "one" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(renamed["one"].name, renamed["to"].name))
    before = one.tensors["a.weight"].file
    assert Checkpoint.open(tmp_path / "one").tensors["a.weight"].file != before
    shard.write_bytes(original)
    renamed_digests, digests = Checkpoint.open(tmp_path / "one").digests(), two.digests()
    assert sorted(renamed_digests.values()) == sorted(digests.values()) and "zz.safetensors" in renamed_digests


def test_tokenizer_files_are_those_present(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text("{}")
    found = Checkpoint.open(folder).tokenizer_files
    assert dict(found) == {name: folder / name for name in ("chat_template.jinja", "tokenizer.json")}


def test_code_in_a_checkpoint_is_never_imported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_evil.Evil"}}')
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert Checkpoint.open(folder).config["auto_map"] == {"AutoModel": "modeling_evil.Evil"}
    assert not (tmp_path / "ran").exists()
    assert "modeling_evil" not in sys.modules


# --- malformed tensor files ---------------------------------------------------------------------------------------


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
        "'x' stands twice",
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


# --- shards -------------------------------------------------------------------------------------------------------


def edit_index(folder: Path, **edits: Any) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name, shard in edits.items():
        index["weight_map"][name.replace("__", ".")] = shard
    file.write_text(json.dumps({**index, "weight_map": {k: v for k, v in index["weight_map"].items() if v != "drop"}}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "absent", some_tensors(), 2)
    edit_index(folder, a__weight="drop")
    assert "a.weight in model-00001-of-00002.safetensors, in the index: absent" in refusal(folder)

    folder = write_checkpoint(tmp_path / "lost", some_tensors(), 2)
    edit_index(folder, nothing="model-00001-of-00002.safetensors")
    assert "nothing not in model-00001-of-00002.safetensors" in refusal(folder)

    folder = write_checkpoint(tmp_path / "elsewhere", some_tensors(), 2)
    edit_index(folder, a__weight="model-00002-of-00002.safetensors")
    assert "a.weight not in model-00002-of-00002.safetensors" in refusal(folder)

    folder = write_checkpoint(tmp_path / "shard", some_tensors(), 2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 shards are missing: model-00002-of-00002.safetensors" in refusal(folder)

    folder = write_checkpoint(tmp_path / "both", some_tensors(), 2)
    save_file(some_tensors(), folder / "model.safetensors")
    assert "both model.safetensors and an index" in refusal(folder)


def test_an_index_of_the_single_file_is_taken(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    weight_map = dict.fromkeys(some_tensors(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert Checkpoint.open(folder).tensors.keys() == weight_map.keys()


@pytest.mark.parametrize(
    "shard",
    ["../evil.safetensors", "/tmp/evil.safetensors", "a/b.safetensors", "a\\b.safetensors", "", "x", 3, None, []],
)
def test_shard_names_stay_in_the_folder(tmp_path: Path, shard: object) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "evil.safetensors")
    folder = write_checkpoint(tmp_path / "m", some_tensors(), 2)
    edit_index(folder, x=shard)
    assert "plain name" in refusal(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', "{", '{"weight_map": {"a": "x", "a": "y"}}', "[" * 100_000]
)
def test_malformed_indexes_are_refused(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors(), 2)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(folder)


# --- pickle, folders, configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickle_is_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    # A pickle that would make a file if anything loaded it.
    (tmp_path / name).write_bytes(f"cbuiltins\nopen\n(V{tmp_path / 'ran'}\nVw\ntR.".encode())
    text = refusal(tmp_path)
    assert name in text
    assert "safetensors" in text
    with pytest.raises(CheckpointError, match="convert it to safetensors"):
        Checkpoint.open(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_an_index_of_pickle_files_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors(), 2)
    edit_index(folder, x="pytorch_model.bin")
    assert "names a pickle file: 'pytorch_model.bin'" in refusal(folder)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "adapter_model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("path", ["nobody/no-such-model", "gpt2-not-here"])
def test_a_hub_name_is_not_downloaded(path: str) -> None:
    with pytest.raises(ConfigError, match="snapshot_download"):
        Checkpoint.open(path)


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "absent", "no folder"),
        (tmp_path / "file", "not a folder"),
        (tmp_path / "file" / "below", "no folder"),
        ("a\0b", "cannot be opened|no folder"),
        ("x" * 5000, "cannot be opened"),
        (tmp_path, "no config.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            Checkpoint.open(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "type list"),
        (b"3", "type int"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": ' * 100_000, "nested deeper"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "nested deeper"),
        (b'{"a": "' + b"x" * (16 << 20) + b'"}', "too large"),
        (rb'{"a": "\uDC00"}', "surrogate"),
    ],
)
def test_malformed_configurations(tmp_path: Path, data: bytes, message: str) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        Checkpoint.open(folder)


def test_a_configuration_may_be_sixty_four_levels_deep(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_bytes(b'{"a": ' * 64 + b"1" + b"}" * 64)
    Checkpoint.open(folder)


def test_a_configuration_may_hold_infinity(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", some_tensors())
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert Checkpoint.open(folder).config["time_step_limit"][1] == float("inf")


# --- totality -----------------------------------------------------------------------------------------------------


def test_totality_lists_everything_at_once(tmp_path: Path) -> None:
    tensors = {
        "used": torch.ones(2, 3),
        "extra.one": torch.ones(1),
        "rotary.0.inv_freq": torch.ones(4),
        "misshaped": torch.ones(5, 6),
        "typed": torch.ones(7, dtype=torch.int32),
        "eight_bit": torch.ones(8).to(torch.float8_e4m3fn),
    }
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tensors))
    expected = {"used": (2, 3), "misshaped": (6, 5), "typed": (7,), "eight_bit": (8,), "absent": (9, 10)}
    rule = r"rotary\.\d+\.inv_freq"
    with pytest.raises(CheckpointError) as caught:
        check_totality(checkpoint, expected.keys(), [rule], expected)
    text = str(caught.value)
    assert "1 missing from the checkpoint:\n    absent [9, 10]\n" in text
    assert "1 extra, neither used nor ignored by a rule:\n    extra.one [1]\n" in text
    assert "misshaped: expected [6, 5], found [5, 6]\n" in text
    assert "2 not floating point" in text
    assert "typed: found int32" in text
    assert "eight_bit: found float8_e4m3fn" in text
    assert "rotary" not in text
    assert "used:" not in text

    good = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name != "rotary.0.inv_freq"}
    check_totality(checkpoint, good.keys(), [rule], good, floating=["used"])
    with pytest.raises(CheckpointError, match="rotary"):  # a rule must match the whole name
        check_totality(checkpoint, good.keys(), [rule[:-1]], good, floating=[])


def test_totality_cuts_long_lists(tmp_path: Path) -> None:
    tensors = {f"t{i:02d}": torch.ones(1) for i in range(25)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", tensors))
    with pytest.raises(CheckpointError) as caught:
        check_totality(checkpoint, [], [], {})
    text = str(caught.value)
    assert "25 extra" in text
    assert "t19" in text
    assert "t20" not in text
    assert "5 more" in text
