"""Hashes of token blocks: what prefix caching looks pages up by."""

import hashlib
import itertools
import random
from typing import Any

import pytest

from ingot.ir.errors import InternalError
from ingot.runtime.pages.block_hashes import BlockHashes
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.scheduling.request import Given, Request


def hashes(tokens: list[int], block_size: int = 4, **options: Any) -> list[bytes]:
    made = BlockHashes(block_size, **options)
    assert made.extend(tokens) == made.digests and made.num_tokens == len(tokens)
    return made.digests


def test_known_vector() -> None:
    """Byte by byte, with hashlib alone."""
    root = hashlib.sha256(b"ingot block hashes 1" + b"\x02\0\0\0" + b"\x03\0\0\0\0\0\0\0" + b"abc").digest()
    keys = b"\x01\0\0\0\0\0\0\0" + b"k" + bytes(8)
    first = hashlib.sha256(root + b"\x07\0\0\0" + b"\x01\x02\0\0" + keys).digest()
    second = hashlib.sha256(first + b"\0\0\0\0" + b"\xff\xff\xff\xff" + keys).digest()
    found = hashes([7, 513, 0, 2**32 - 1, 5], 2, salt=b"abc", extra_keys=[b"k", b""])
    assert found == [first, second]
    # The hash is also compared with a constant: a change of the function makes every kept hash worthless.
    assert hashes([1, 2, 3, 4])[0].hex() == "05cda55a41a5548df43bb5d96e3054ec2f572cb25f17411f9081065fb9a7f159"


def test_a_block_is_named_by_all_that_comes_before_it() -> None:
    tokens = list(range(12))
    whole = hashes(tokens)
    assert len(whole) == len(set(whole)) == 3
    for changed in range(12):
        other = hashes([*tokens[:changed], 99, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(whole, other, strict=True)] == [block < changed // 4 for block in range(3)]
    # The same tokens in another place are another block, and blocks in another order are others.
    assert len(set(hashes([1, 2, 3, 4] * 3))) == 3
    assert set(hashes([*tokens[4:8], *tokens[:4]])).isdisjoint(whole)


def test_a_copy_goes_on_by_itself() -> None:
    first = BlockHashes(4)
    first.extend(range(6))
    second = first.copy()
    first.extend([6, 7, 8])
    second.extend([7, 7])
    assert first.digests == hashes(list(range(9))) and second.digests == hashes([*range(6), 7, 7])
    assert (first.num_tokens, second.num_tokens) == (9, 8)


def test_full_blocks_only() -> None:
    for count in range(10):
        assert hashes(list(range(count))) == hashes(list(range(9)))[: count // 4]
    assert hashes([]) == []


def test_salt_and_keys_keep_sequences_apart() -> None:
    tokens = list(range(8))
    made = [
        hashes(tokens),
        hashes(tokens, salt=b"tenant a"),
        hashes(tokens, salt=b"tenant b"),
        hashes(tokens, extra_keys=[b"adapter 1"]),
        hashes(tokens, extra_keys=[b"adapter 2"]),
        hashes(tokens, salt=b"tenant a", extra_keys=[b"adapter 1"]),
        hashes(tokens, salt=b"adapter 1"),
    ]
    assert len({digest for digests in made for digest in digests}) == 2 * len(made)
    assert hashes(tokens, salt=b"tenant a") == made[1]


def test_no_two_contents_read_the_same() -> None:
    """What would be equal if the parts were only put one behind the other."""
    zeros = bytes(4)
    groups: list[list[list[bytes]]] = [
        [
            hashes([1] * 4, extra_keys=keys)
            for keys in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"", b"abc"], [b"c", b"ab"])
        ],
        [hashes([1, 0, 0, 0]), hashes([1, 0, 0, 256]), hashes([0, 1, 0, 0]), hashes([256, 0, 0, 0])],
        [hashes([0] * 4, 4), hashes([0] * 4, 2), hashes([0] * 4, 1), hashes([0] * 3, 3, extra_keys=[zeros])],
        [hashes([5] * 4, salt=b"s" + zeros), hashes([5] * 4, salt=b"s"), hashes([5] * 4, salt=b"", extra_keys=[b"s"])],
    ]
    for group in groups:
        for left, right in itertools.combinations(group, 2):
            assert set(left).isdisjoint(right)


@pytest.mark.parametrize("seed", range(5))
def test_a_request_keeps_its_hashes_as_tokens_come(seed: int) -> None:
    """A prompt, then outputs one or a few at a time: the hashes of the whole."""
    draw = random.Random(seed)
    request = Request(Given("r", [draw.randrange(1000) for _ in range(draw.randrange(1, 40))], SamplingParams()))
    kept = BlockHashes(16, salt=b"tenant")
    seen = kept.extend(request.prompt_ids)
    while len(request.output_ids) < 60:
        request.output_ids += [draw.randrange(1000) for _ in range(draw.choice((1, 1, 1, 4, 20)))]
        fresh = kept.extend(request.known_tokens(kept.num_tokens, request.num_known))
        seen = [*seen, *fresh]
        assert kept.digests == seen == hashes(request.known_tokens(0, request.num_known), 16, salt=b"tenant")


def test_what_is_no_token_or_no_block() -> None:
    kept = BlockHashes(4)
    kept.extend([1, 2])
    for token in (-1, 2**32):
        with pytest.raises(InternalError, match=f"{token} is no token id"):
            kept.extend([3, token])
    assert kept.num_tokens == 2, "nothing was taken"
    assert kept.extend([3, 4]) == hashes([1, 2, 3, 4])
    with pytest.raises(InternalError, match="blocks of 0 tokens"):
        BlockHashes(0)
