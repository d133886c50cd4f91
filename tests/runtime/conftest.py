"""An engine on a simulated device, and a small byte-level tokenizer for it."""

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers

from ingot.runtime.text.tokenizer import Tokenizer

pytest.register_assert_rewrite("fake_device", "served")  # what they assert is told as a test's own


@pytest.fixture
def serve() -> type:
    from served import Served

    return Served


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE of all bytes and some merges, also inside characters; 256 + 44 tokens, `<eos>`, `<sep>`,
    `[x]`."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=303,
        special_tokens=["<eos>", "<sep>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat und die Katze, 日本語 日本 🙂🙃 été déjà vu — the end"] * 5, trainer)
    backend.add_tokens(["[x]"])  # an added token that is not special
    return backend


@pytest.fixture(scope="session")
def tokenizer(byte_level: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_level, eos_token_ids=[byte_level.token_to_id("<eos>")])


@pytest.fixture
def texts(serve, tokenizer):
    """A served byte-level model that says `says` after the prompt "go", then `<eos>`."""

    def make(says="one two three", **options):
        served = serve(tokenizer=tokenizer, max_tokens=32, **options)
        served.says = tokenizer.encode(says)
        served.device.script(tokenizer.encode("go"), [*served.says, *tokenizer.eos_token_ids, *[3] * 40])
        return served

    return make
