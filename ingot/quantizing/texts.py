"""Read a calibration text, and cut it into sequences of tokens: some to quantize with, and others to measure on."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.ir.errors import CalibrationError, IngotError
from ingot.ir.json_text import parse_json
from ingot.runtime.text.tokenizer import Tokenizer

# The name of the text that comes with Ingot: excerpts of its documentation and code.
BUILTIN = "builtin"
BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl")
# Tokens of a sequence. Longer ones cost more in attention and show the method no more.
SEQUENCE = 512
# Most tokens to quantize with. The GPTQ paper takes 128 sequences of 2048 (section 4); a quarter of that, because CPUs
# run them.
MOST_TOKENS = 65_536
# Most tokens to measure on: they run through the original and the quantized model.
MOST_HELD_OUT = 8192
# A method needs about as many tokens as a linear has inputs; more than these for wide linears improve little.
ENOUGH_TOKENS = 2048
# Most numbers of one activation of all sequences: 1 GiB in float32. In a gated feed-forward part three such activations
# are in memory at once. For linears of 14,336 inputs, as in Llama 3.1 8B, it allows 18,724 tokens.
MOST_NUMBERS = 1 << 28
_MAX_BYTES = 64 << 20  # many times MOST_TOKENS


@dataclass(frozen=True)
class CalibrationText:
    """A calibration text as tokens. `name` is "builtin" or the name of a file.

    - `sequences`: those that a method quantizes with
    - `held_out`: those that the model is measured on. They come from other documents, or from the end of a single one
    """

    name: str
    sequences: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def digest(self) -> str:
        """Return the SHA-256 of all tokens in their sequences. It is part of a compile's identity."""
        return hashlib.sha256(json.dumps([self.sequences, self.held_out]).encode()).hexdigest()

    def within(self, columns: int) -> "CalibrationText":
        """Return the text with as many tokens to quantize with as fit into memory, for linears of `columns` inputs."""
        return replace(self, sequences=_first(self.sequences, MOST_NUMBERS // columns))

    def check(self, columns: int, what: str = "the widest weight has {columns} inputs") -> None:
        """Raise CalibrationError if there are too few tokens for linears with up to `columns` inputs.

        `what` is the reason in the message.
        """
        least = min(columns, ENOUGH_TOKENS)
        short = min(self.tokens, sum(map(len, self.held_out)))
        if short < least:
            raise CalibrationError(
                f"the calibration text has {self.tokens} tokens to calibrate with and "
                f"{sum(map(len, self.held_out))} to measure on",
                where=self.name,
                expected=f"at least {least} of each, so about {2 * least}: {what.format(columns=columns)}",
                hint=f"give more text, or --calibrate {BUILTIN}",
            )


def read_text(name: str, tokenizer_folder: Path, vocab_size: int, max_seq_len: int) -> CalibrationText:
    """Read the calibration text `name`, which is "builtin" or the path of a text or JSONL file, as tokens.

    The tokenizer is in `tokenizer_folder`, the checkpoint's folder. A JSONL file has a document per line, an object
    with the key "text". A text file is one document. Sequences have at most `max_seq_len` tokens. Raises
    CalibrationError.
    """
    documents = read_documents(BUILTIN_FILE if name == BUILTIN else Path(name))
    if not any(map(str.strip, documents)):
        raise CalibrationError("the calibration text is empty", where=name, expected=_EXPECTED, hint=_HINT)
    try:
        encoded = Tokenizer.load(tokenizer_folder).encode_all(documents)
    except IngotError as error:
        raise CalibrationError(
            f"the calibration text cannot be turned into tokens: {error.what}",
            where=str(tokenizer_folder),
            expected="a checkpoint with tokenizer.json, and valid text",
        ) from error
    if (largest := max(map(max, filter(None, encoded)), default=0)) >= vocab_size:
        raise CalibrationError(
            f"the tokenizer makes token {largest}, and the model has {vocab_size} tokens", where=str(tokenizer_folder)
        )
    size = min(SEQUENCE, max_seq_len)
    return CalibrationText(BUILTIN if name == BUILTIN else Path(name).name, *_divided(encoded, size))


_EXPECTED = f"some thousand tokens of text; about {2 * ENOUGH_TOKENS} are enough for every model"
_HINT = f"give a file with text, or --calibrate {BUILTIN}"


def read_documents(path: Path) -> list[str]:
    """Return the documents of a text or JSONL file. Raises CalibrationError."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise CalibrationError(
            f"the calibration text cannot be read: {error.strerror}", where=str(path), hint=_HINT
        ) from None
    except UnicodeDecodeError as error:
        raise CalibrationError(f"the calibration text is not UTF-8: {error.reason}", where=str(path)) from None
    if len(data) > _MAX_BYTES:
        raise CalibrationError(
            f"the calibration text has more than {_MAX_BYTES} bytes", where=str(path), expected=_EXPECTED
        )
    if path.suffix != ".jsonl":
        return [text]
    return [_document(line, f"{path}, line {number}") for number, line in enumerate(text.split("\n"), 1) if line]


def _document(line: str, where: str) -> str:
    try:
        found: Any = parse_json(line.encode())
    except ValueError as error:
        raise CalibrationError(f"the line is not JSON: {error}", where=where) from None
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise CalibrationError("the line has no text", where=where, expected='{"text": "…"}')
    return text


def _divided(
    documents: Sequence[Sequence[int]], size: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the sequences to quantize with and those to measure on, of at most `size` tokens each.

    Documents go to the half that has fewer tokens. A single document is cut in the middle.
    """
    given = [document for document in documents if document]
    if len(given) == 1:
        middle = (len(given[0]) + 1) // 2
        given = [given[0][:middle], given[0][middle:]]
    halves: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    tokens = [0, 0]
    for document in given:
        half = int(tokens[1] < tokens[0])
        tokens[half] += len(document)
        for begin in range(0, len(document), size):
            sequence = tuple(document[begin : begin + size])
            if len(sequence) > 1:  # one token predicts nothing
                halves[half].append(sequence)
    return _first(halves[0], MOST_TOKENS), _first(halves[1], MOST_HELD_OUT)


def _first(sequences: Sequence[tuple[int, ...]], most: int) -> tuple[tuple[int, ...], ...]:
    """Return the first sequences that have at most `most` tokens together, and at least one."""
    taken: list[tuple[int, ...]] = []
    total = 0
    for sequence in sequences:
        total += len(sequence)
        if taken and total > most:
            break
        taken.append(sequence)
    return tuple(taken)
