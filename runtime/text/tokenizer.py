"""The tokenizer of an artifact, which turns text into token ids and back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from ingot.ir.errors import ArtifactError, RequestError

REPLACEMENT = "\ufffd"  # a decoder's text for invalid UTF-8; at the end of a text, the character may be incomplete


class Tokenizer:
    """A tokenizer of the Hugging Face `tokenizers` library, with the begin and end tokens from the model's files.

    backend         the library's tokenizer; read only
    vocab_size      number of tokens, including added ones; the model's embedding may have more rows
    eos_token_ids   tokens that end a sequence; empty if no file names one
    bos_token_id    the begin token, or None
    added_tokens    id -> text of the tokens outside the learned vocabulary, special or not
    special_ids     the ids of special tokens; `skip_special_tokens` removes them from text. All are in `added_tokens`
    special_tokens  text -> id of the special tokens
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_token_ids: Sequence[int] = (), bos_token_id: int | None = None
    ) -> None:
        backend.no_truncation()  # some checkpoints keep the settings of their training run
        backend.no_padding()
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens: Mapping[str, int] = {self.added_tokens[one]: one for one in sorted(self.special_ids)}
        self._joins_bytes = isinstance(backend.decoder, decoders.ByteLevel)
        self._alone: dict[bool, dict[int, str]] = {False: {}, True: {}}  # by skip_special_tokens and token

    @classmethod
    def load(cls, folder: Path | str, eos_fallback: int | Sequence[int] | None = None) -> "Tokenizer":
        """Load the tokenizer in a folder, from `tokenizer.json`. `tokenizer_config.json` and `generation_config.json`
        are read if they exist.

        Both may name end tokens, and all of these end a sequence. If generation_config.json names none, `eos_fallback`
        is used in its place (config.json's `eos_token_id`). `add_bos_token` and `add_eos_token` of
        tokenizer_config.json decide whether prompts get begin and end tokens, as in transformers. Without these, the
        tokenizer's post-processor decides.

        Raises ArtifactError, with file and field, for a missing or damaged file.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ArtifactError("no tokenizer", where=str(path), hint="give token ids instead of text")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"not a tokenizer: {error}", where=str(path)) from error
        config = read_json(folder / "tokenizer_config.json")
        generation = read_json(folder / "generation_config.json")

        bos = _token_id(backend, config, "bos_token", folder, needed=bool(config.get("add_bos_token")))
        eos = _token_id(backend, config, "eos_token", folder, needed=bool(config.get("add_eos_token")))
        if "add_bos_token" in config or "add_eos_token" in config:
            _set_template(
                backend, bos if config.get("add_bos_token") else None, eos if config.get("add_eos_token") else None
            )
        named = generation.get("eos_token_id")
        eos_ids = _eos_ids(eos_fallback, "config.json") if named is None else _eos_ids(named, "generation_config.json")
        return cls(backend, eos_token_ids=[*eos_ids, *([] if eos is None else [eos])], bos_token_id=bos)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of one prompt. Text of a special token, such as "</s>", becomes that token. Raises
        RequestError for invalid Unicode."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each prompt. Prompts are encoded in parallel.

        Text of a special token, such as "</s>", becomes that token, as in vLLM's `generate`. The tokenizer may add
        begin and end tokens. For untrusted text, use `ingot.runtime.chat.template`: there, messages cannot produce
        special tokens.

        Raises RequestError for invalid Unicode (lone surrogates).
        """
        for text in texts:
            _check_unicode(text)
        if len(texts) == 1:  # without the cost of other threads
            return [self.backend.encode(texts[0], add_special_tokens=True).ids]
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=True)]

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text without begin and end tokens. Raises RequestError for invalid Unicode."""
        _check_unicode(text)
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a list of token ids. Unknown ids have no text. With `skip_special_tokens`, special tokens
        have none."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_alone(self, token_id: int, skip_special_tokens: bool) -> str:
        """Return the text of one token, decoded without other tokens. Results are cached."""
        alone = self._alone[skip_special_tokens]
        if token_id not in alone:
            alone[token_id] = self.decode([token_id], skip_special_tokens)
        return alone[token_id]

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return whether `decode` returns text for a token. Unknown tokens have no text. With `skip_special_tokens`,
        special tokens have none."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self.backend.id_to_token(token_id) is not None

    def text_of(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the text that a token adds, whatever the tokens before it; "" if `decode` leaves the token out.

        Return None if the text depends on the tokens before it. This is so for a part of a character, and for
        tokenizers that are not byte-level.
        """
        if not self._joins_bytes:
            return None
        # A byte-level decoder joins the bytes of all tokens, and valid UTF-8 decodes equally after any bytes.
        text = self.decode_alone(token_id, skip_special_tokens)
        return None if REPLACEMENT in text else text


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty dict if the file does not exist. Raises ArtifactError for other
    content."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise ArtifactError(f"a JSON {type(content).__name__}", where=str(path), expected="a JSON object")
    return content


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("the prompt is no valid Unicode text", where=f"character {error.start}") from error


def _token_id(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], field: str, folder: Path, *, needed: bool
) -> int | None:
    """Return the id of the token that `config` names in `field`, such as "bos_token"; None if it names none.

    folder   the tokenizer's folder, for the error
    needed   raise ArtifactError if the vocabulary lacks the token; False: return None. Many configs name such a token
             and never use it
    """
    token = config.get(field)
    if isinstance(token, Mapping):  # an AddedToken, written out
        token = token.get("content")
    token_id: int | None = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None and needed and token is not None:
        raise ArtifactError(
            f"{field} = {token!r} is not in the vocabulary",
            where=f"{folder / 'tokenizer_config.json'}, {field}",
            expected="a token of tokenizer.json",
        )
    return token_id


def _eos_ids(value: object, file: str) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ArtifactError(
            f"eos_token_id = {value!r}", where=f"{file}, eos_token_id", expected="a token id or a list of them"
        )
    return list(ids)


def _set_template(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    first, last = (None if token is None else backend.id_to_token(token) for token in (bos, eos))
    single = [*([] if first is None else [f"{first}:0"]), "$A:0", *([] if last is None else [f"{last}:0"])]
    special = {token: token_id for token, token_id in ((first, bos), (last, eos)) if token is not None}
    backend.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=list(special.items()))
