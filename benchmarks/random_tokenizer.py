"""Write a tokenizer of a published vocabulary's size, for checkpoints of random weights that a server detokenizes.

Every token but the first 256, which are the bytes, is a word of lower-case letters after a space. So each generated
token has its text at once, as most tokens of a published model have.
"""

import itertools
import json
import string
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_LETTERS = 4  # of a word: 456,976 words, more than any vocabulary


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `vocab_size` tokens into the checkpoint `folder`."""
    words = ("Ġ" + "".join(one) for one in itertools.product(string.ascii_lowercase, repeat=_LETTERS))
    pieces = itertools.chain(sorted(ByteLevel.alphabet()), words)
    vocab = {piece: token for token, piece in enumerate(itertools.islice(pieces, vocab_size))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
