"""The tokenizer of a GGUF file, written as the tokenizer.json and tokenizer_config.json of Hugging Face."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ingot.frontend.gguf.file import GgufFile

# The patterns that split a text before merges, by tokenizer.ggml.pre (llama.cpp, src/llama-vocab.cpp).
_LLAMA3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_PATTERNS: Mapping[str, str] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # values of tokenizer.ggml.token_type


def write_tokenizer(file: GgufFile, folder: Path) -> dict[str, Path]:
    """Write the tokenizer of a GGUF file into `folder`, and return the files by name; empty if it has none.

    Raises ConfigError for a tokenizer of another kind.
    """
    data = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    kind, tokens = data.get("model"), data.get("tokens")
    if kind is None or not isinstance(tokens, list):
        return {}
    if kind == "gpt2":
        made = _byte_level(file, data, tokens)
    elif kind == "llama":
        made = _sentence_piece(data, tokens)
    else:
        raise file.error(f"the tokenizer '{kind}' of a GGUF file cannot be read", "gpt2 or llama")
    types = data.get("token_type") or [1] * len(tokens)
    special = [_added(text) for text, of in zip(tokens, types, strict=True) if of in (_CONTROL, _UNKNOWN)]
    made.add_special_tokens(special)
    made.add_tokens([_added(text) for text, of in zip(tokens, types, strict=True) if of == _USER])
    made.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"add_bos_token": bool(data.get("add_bos_token", kind == "llama"))}
    config["add_eos_token"] = bool(data.get("add_eos_token", False))
    for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("unk_token", "unknown_token_id")):
        if isinstance(place := data.get(key), int) and 0 <= place < len(tokens):
            config[name] = tokens[place]
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return {name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")}


def _added(text: str) -> AddedToken:
    return AddedToken(text, normalized=False, special=False)


def _byte_level(file: GgufFile, data: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    before = str(data.get("pre", "gpt-2"))
    if before not in _PATTERNS:
        raise file.error(f"the pre-tokenizer '{before}' of a GGUF file cannot be read", ", ".join(_PATTERNS))
    vocabulary = {text: place for place, text in enumerate(tokens)}
    merges = [tuple(one.split(" ", 1)) for one in data.get("merges") or []]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=before != "gpt-2"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERNS[before]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece(data: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer with the merges that the scores of a SentencePiece model stand for.

    Such a model merges the pair whose union has the highest score. So every way to cut a token into two tokens is a
    merge, ordered by the token's score.
    """
    vocabulary = {text: place for place, text in enumerate(tokens)}
    scores = data.get("scores") or [0.0] * len(tokens)
    merges = []
    for text, place in vocabulary.items():
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        own = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        own.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-float(scores[place]), left, right) for left, right in own]
    merges.sort(key=lambda one: one[0])
    unknown = data.get("unknown_token_id")
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, left, right in merges],
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = [normalizers.Prepend("▁")] if data.get("add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*spaced, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made
