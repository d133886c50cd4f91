"""A simulated device for the scheduler and the engine, and a small byte-level tokenizer.

The device keeps what a real one keeps: last token and position per row, and a paged cache. Every slot of the cache
holds the token and position that were written there, or poison. A sampled token is a hash of the whole context as
read back through the page table, of the position and of the sampling parameters, so any wrong position, page, row or
parameter changes tokens or trips an assertion. A step runs only when its tokens are asked for, the latest moment a
real device may choose.
"""

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers, trainers

from ingot.runtime.engine import Engine
from ingot.runtime.pages import PagePool
from ingot.runtime.sampling_params import SamplingParams
from ingot.runtime.scheduler import Scheduler, SchedulerConfig
from ingot.runtime.step import STEP_FIELDS, StepInputs, step_views
from ingot.runtime.tokenizer import Tokenizer

VOCAB = 997
POISON = (-7, -7)


def hashed_token(context: Sequence[int], knobs: tuple[float, int, float, float, int], vocab: int = VOCAB) -> int:
    """The token after `context`; knobs are temperature, top_k, top_p, min_p, seed."""
    temperature, top_k, top_p, min_p, seed = knobs
    key = struct.pack("<fiffq", temperature, top_k, top_p, min_p, seed if temperature else 0)
    digest = hashlib.blake2b(np.asarray(context, np.int64).tobytes() + key, digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab


class FakeHandle:
    def __init__(self, device: "FakeDevice", inputs: StepInputs) -> None:
        self._device, self._inputs = device, inputs

    def tokens(self) -> list[int]:
        return self._device.run(self)

    @property
    def inputs(self) -> StepInputs:
        return self._inputs


class FakeDevice:
    """An executor. `script(prompt, outputs)` fixes what follows a prompt; `invalid` says when logits are not finite."""

    def __init__(self, num_pages: int, page_size: int, max_batch: int, max_tokens: int, vocab: int = VOCAB) -> None:
        self.page_size, self.max_batch, self.max_tokens, self.vocab = page_size, max_batch, max_tokens, vocab
        self.cache = [[POISON] * page_size for _ in range(num_pages)]
        self.last_token: list[int | None] = [None] * max_batch
        self.position: list[int | None] = [None] * max_batch
        self.scripts: list[tuple[list[int], list[int]]] = []
        self.invalid: Callable[[list[int]], bool] = lambda context: False
        self.launched: list[FakeHandle] = []
        self.num_launches = self.num_sampled = self.most_tokens = self.most_sequences = self.num_on_device = 0
        self.fail_at = -1

    def script(self, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        self.scripts.append((list(prompt), list(outputs)))

    def poison(self, pages: list[int]) -> None:
        for page in pages:
            self.cache[page] = [POISON] * self.page_size

    def launch(self, inputs: StepInputs) -> FakeHandle:
        self.num_launches += 1
        if self.num_launches == self.fail_at:
            raise RuntimeError("the device is on fire")
        handle = FakeHandle(self, inputs)
        self.launched.append(handle)
        assert len(self.launched) <= 2
        return handle

    def run(self, handle: FakeHandle) -> list[int]:
        assert self.launched.pop(0) is handle, "steps run in order"
        inputs = handle.inputs
        assert list(inputs) == [name for name, _, _ in STEP_FIELDS]
        sizes = {"T": inputs.sizes.T, "B": inputs.sizes.B, "L": inputs.sizes.L, "P": inputs.sizes.P}
        copied = step_views(inputs.flat.clone(), inputs.sizes)  # what a device gets: one copy of the flat buffer
        for name, dtype, dims in STEP_FIELDS:
            assert inputs[name].dtype == dtype and list(inputs[name].shape) == [sizes[dim] for dim in dims], name
            assert inputs[name].data_ptr() % dtype.itemsize == 0 and torch.equal(inputs[name], copied[name]), name
        value = {name: view.tolist() for name, view in copied.items()}
        assert 1 <= sizes["T"] <= self.max_tokens and 1 <= sizes["L"] <= sizes["B"] <= self.max_batch
        assert len(set(value["rows"])) == sizes["B"] and all(0 <= row < self.max_batch for row in value["rows"])
        assert value["q_starts"] == [0, *itertools.accumulate(value["q_lens"])][:-1] and min(value["q_lens"]) >= 1
        expected_seqs = [seq for seq, length in enumerate(value["q_lens"]) for _ in range(length)]
        assert value["token_seqs"] == expected_seqs and len(value["tokens"]) == len(expected_seqs)
        self.most_tokens = max(self.most_tokens, sizes["T"])
        self.most_sequences = max(self.most_sequences, sizes["B"])

        used: set[int] = set()
        sampled: list[int | None] = [None] * sizes["L"]
        for seq in range(sizes["B"]):
            token = self._run_sequence(seq, value, used)
            index = value["sample_index"][seq]
            if index >= 0:
                assert sampled[index] is None and token is not None
                sampled[index] = token
        if sampled == [None]:
            assert value["logit_rows"] == [0]  # the dummy row
            return [123]
        assert None not in sampled
        self.num_sampled += len(sampled)
        return [token for token in sampled if token is not None]

    def _run_sequence(self, seq: int, value: dict[str, list], used: set[int]) -> int | None:
        row, length, start = value["rows"][seq], value["q_lens"][seq], value["starts"][seq]
        first = value["q_starts"][seq]
        tokens = value["tokens"][first : first + length]
        assert (start == -1) == (tokens == [-1]) and (start == -1 or min(tokens) >= 0)
        if start == -1:
            self.num_on_device += 1
            assert self.position[row] is not None and self.last_token[row] is not None, "nothing to continue from"
            start, tokens = self.position[row], [self.last_token[row]]
        end = start + length
        num_pages = -(-end // self.page_size)
        assert num_pages <= len(value["page_table"][seq]), "the page table is too short"
        pages = value["page_table"][seq][:num_pages]
        assert len(set(pages)) == num_pages and not used & set(pages), "two places share a page"
        used |= set(pages)
        for position, token in zip(range(start, end), tokens, strict=True):
            self.cache[pages[position // self.page_size]][position % self.page_size] = (token, position)
        self.position[row], self.last_token[row] = end, None

        index = value["sample_index"][seq]
        if index < 0:
            return None
        assert value["logit_rows"][index] == first + length - 1
        context: list[int] = []
        for position in range(end):
            token, written_for = self.cache[pages[position // self.page_size]][position % self.page_size]
            assert written_for == position, f"position {position} reads {token, written_for}"
            context.append(token)
        sampled = self._next(
            context, tuple(value[k][index] for k in ("temperature", "top_k", "top_p", "min_p", "seeds"))
        )
        self.last_token[row] = max(sampled, 0)
        return sampled

    def _next(self, context: list[int], knobs: tuple) -> int:
        if self.invalid(context):
            return -1
        for prompt, outputs in self.scripts:
            done = len(context) - len(prompt)
            if 0 <= done < len(outputs) and context == prompt + outputs[:done]:
                return outputs[done]
        return hashed_token(context, knobs, self.vocab)


class Served:
    """An engine on a fake device, with what tests look at."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_batch: int = 4,
        max_tokens: int = 16,
        max_seq_len: int = 64,
        chunked_prefill: bool = True,
        permute_seed: int | None = None,
        tokenizer: Tokenizer | None = None,
        eos: Sequence[int] = (),
    ) -> None:
        vocab = VOCAB if tokenizer is None else tokenizer.vocab_size
        self.device = FakeDevice(num_pages, page_size, max_batch, max_tokens, vocab)
        self.pool = PagePool(num_pages, page_size, permute_seed=permute_seed, on_release=self.device.poison)
        self.config = SchedulerConfig(max_batch, max_tokens, max_seq_len, page_size, chunked_prefill)
        self.scheduler = Scheduler(self.config, self.pool)
        self.engine = Engine(self.device, self.scheduler, tokenizer, vocab_size=vocab, eos_token_ids=eos or None)
        self.vocab = vocab

    def expected(
        self, prompt: Sequence[int], params: SamplingParams, seed: int = 0, count: int | None = None
    ) -> list[int]:
        """The tokens that the model gives for a prompt alone, without any stop."""
        knobs = (params.temperature, params.top_k, params.top_p, params.min_p, seed)
        if params.greedy:
            knobs = (0.0, 0, 1.0, 0.0, 0)
        count = count if count is not None else params.max_tokens
        context = list(prompt)
        for _ in range(min(count, self.config.max_seq_len - len(prompt))):
            context.append(hashed_token(context, knobs, self.vocab))
        return context[len(prompt) :]

    def check(self) -> None:
        """What holds between any two steps."""
        scheduler, pool = self.scheduler, self.pool
        held = [page for request in scheduler.running for page in request.pages]
        assert len(held) == len(set(held)) == pool.num_held
        assert len(scheduler.running) + scheduler.num_free_rows == self.config.max_batch
        assert len({request.row for request in scheduler.running}) == len(scheduler.running)
        assert set(scheduler.requests.values()) == {*scheduler.running, *scheduler.waiting}
        assert all(not request.pages and request.row == -1 for request in scheduler.waiting)
        order = [request.request_id for request in (*scheduler.running, *scheduler.waiting)]
        assert order == [request_id for request_id in scheduler.requests], "running and waiting are in order of arrival"

    def step(self) -> list:
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        before = oldest.preemptions if oldest else 0
        outputs = self.engine.step()
        assert oldest is None or oldest.preemptions == before, "the oldest running request was preempted"
        self.check()
        return outputs

    def drain(self, max_steps: int = 5000) -> dict:
        """Run until nothing is left; the last output of every request."""
        last = {}
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                break
            for output in self.step():
                last[output.request_id] = output
        assert not self.engine.has_unfinished(), "it does not come to an end"
        self.check_empty()
        return last

    def check_empty(self) -> None:
        assert self.pool.num_free == self.pool.num_pages and self.scheduler.num_free_rows == self.config.max_batch
        assert not self.scheduler.requests and not self.scheduler.running and not self.scheduler.waiting
        assert self.device.most_tokens <= self.config.max_tokens and self.device.most_sequences <= self.config.max_batch


@pytest.fixture
def serve() -> type[Served]:
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
