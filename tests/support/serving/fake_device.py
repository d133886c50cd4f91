"""A simulated device for the scheduler and the engine.

The device keeps what a real one keeps: last token, position and token counts per row, and a paged cache. Every slot of
the cache holds the token and position that were written there, or poison. A sampled token is a hash of the whole
context as read back through the page table, of the position, of the sampling parameters and of the counts, so any
wrong position, page, row or parameter changes tokens or trips an assertion; and so is a log-probability. A step runs
only when its tokens are asked for, the latest moment a real device may choose.

With `drafts` it proposes so many tokens behind each that it takes, of which some are wrong. Fed behind that token, they
are kept up to the first wrong one; the slots of the others are poison again.

With `lifetimes`, the pages of groups of caches by name, it also has a cache for each such group, and each token that is
fed reads the tokens that it sees there. The pages that `scratch` numbers are poison again after each step.

With `stages` it is a pipeline, so as many steps are in flight, and one more. The rows that the newest of them sample
for have no place in the step after them.

With `slots` it has a state that stands once per sequence: all tokens so far, in the slot that a step writes. What a
step reads there goes before what it feeds, and has to be what the cache holds.
"""

import hashlib
import itertools
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ingot.ir.cache.groups import CacheGroup
from ingot.ir.errors import StepMemoryError
from ingot.ir.features.sharing import COUNT, FIRST, LEADER, LENGTH, MEMBER, OWN
from ingot.ir.masks import Mask
from ingot.ir.ops.logit_edits import EditParts, forbid
from ingot.runtime.steps.step import StepInputs, StepLayout

VOCAB = 997
POISON = (-7, -7)


@dataclass(frozen=True)
class Knobs:
    """What a row of logits is sampled with; `counts` are the tokens in its prompt and those generated, or None."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    counts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    banned: tuple[int, ...] = ()  # by `min_tokens` and by edits
    biases: tuple[tuple[int, float], ...] = ()


def hashed(context: Sequence[int], key: bytes = b"") -> int:
    digest = hashlib.blake2b(np.asarray(context, np.int64).tobytes() + key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hashed_token(context: Sequence[int], knobs: Knobs, vocab: int = VOCAB) -> int:
    """The token after `context`."""
    k = knobs
    key = struct.pack("<fifffq", k.temperature, k.top_k, k.top_p, k.min_p, k.typical_p, k.seed if k.temperature else 0)
    if k.counts is not None:
        key += struct.pack("<fff", k.repetition, k.frequency, k.presence) + repr(k.counts).encode()
    if k.biases:
        key += repr(k.biases).encode()
    token = hashed(context, key) % vocab
    banned = frozenset(k.banned)
    if len(banned) >= vocab:
        return -1  # as where all logits are -inf
    while token in banned:
        token = (token + 1) % vocab
    return token


def hashed_logprobs(context: Sequence[int], token: int, count: int) -> tuple[list[int], list[float], int]:
    """Ids, log-probabilities and rank at the end of `context`: of `token`, then of the `count` most likely tokens."""
    ids = [token, *(hashed(context, b"%d" % place) % VOCAB for place in range(count))]
    return ids, [-(hashed([*context, one]) % 4096) / 64 for one in ids], 1 + hashed([*context, token], b"rank") % VOCAB


class FakeHandle:
    def __init__(self, device: "FakeDevice", inputs: StepInputs) -> None:
        self._device, self._inputs = device, inputs
        self.rows: dict[int, tuple[list[int], list[float], int]] = {}  # log-probabilities that were asked for
        self.not_kept: list[int] = []  # of each sequence, how many of the last tokens fed
        self.masks: dict[int, torch.Tensor] | None = None  # of grammars, by device row

    def tokens(self) -> list[int]:
        return self._device.run(self)

    def finish(self) -> None:
        """Copy the masks that the ending waits for: the host writes them again for the next step."""
        assert self.masks is None and self._inputs.masked, "no input is late"
        assert self._device.launched[0] is self, "the step before is not complete, and its masks would be overwritten"
        self.copy_masks()

    def copy_masks(self) -> None:
        rows = self._inputs.masks.rows.tolist()
        self.masks = dict(zip(rows, self._inputs.masks.words.clone(), strict=True))

    def rejected(self) -> list[int]:
        assert self.not_kept, "asked before the step has run"
        return self.not_kept

    def logprobs(self) -> "FakeHandle":
        return self

    def row(self, index: int) -> tuple[list[int], list[float], int]:
        return self.rows[index]

    @property
    def inputs(self) -> StepInputs:
        return self._inputs


class FakeDevice:
    """An executor. `script(prompt, outputs)` fixes what follows a prompt; `invalid` says when logits are not finite."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_batch: int,
        max_tokens: int,
        vocab: int = VOCAB,
        drafts: int = 0,
        lifetimes: Mapping[str, int] | None = None,
        slots: int = 0,
        scratch: Mapping[str, range] | None = None,
        stages: int = 1,
    ) -> None:
        self.stages, self.most_launched = stages, 0
        self.slots: list[list[int] | None] = [None] * slots  # None: poison
        self.most_slots_read = 0  # in a step that wrote others
        groups = [CacheGroup.named(name) for name in lifetimes or ()]
        self.layout = StepLayout.of(frozenset({*StepLayout.usual().names, *(group.page_table for group in groups)}))
        self.scratch = {group: (scratch or {}).get(group.name, range(0)) for group in groups}
        self.group_caches = {
            group: [[POISON] * page_size for _ in range(max((lifetimes or {})[group.name], self.scratch[group].stop))]
            for group in groups
        }
        self.num_in_scratch = 0  # entries of page tables that were scratch pages
        self.most_group_pages = 0  # that a sequence held when it was fed one token
        self.page_size, self.max_batch, self.max_tokens, self.vocab = page_size, max_batch, max_tokens, vocab
        self.num_drafts = drafts  # proposed behind each token
        self.drafts: list[list[int] | None] = [None] * max_batch
        self.num_drafted = self.num_kept = 0  # drafts that were fed, and those of them that were right
        self.cache = [[POISON] * page_size for _ in range(num_pages)]
        self.last_token: list[int | None] = [None] * max_batch
        self.position: list[int | None] = [None] * max_batch
        self.counts: list[tuple[set[int], list[int]] | None] = [None] * max_batch  # of the prompt; generated
        self.edits: dict[int, Any] = {}  # the row of the state `edits` of each device row that has one
        self.num_edits = 0  # rows of it that were written
        self.num_masked = 0  # rows of logits with masks of grammars
        self.scripts: list[tuple[list[int], list[int]]] = []
        self.invalid: Callable[[list[int]], bool] = lambda context: False
        self.launched: list[FakeHandle] = []
        self.num_launches = self.num_sampled = self.most_tokens = self.most_sequences = self.num_on_device = (
            self.num_shared
        ) = 0
        self.num_scored = self.most_scored = self.most_shared = self.num_fed = 0
        self.fail_at = -1
        self.has_memory: Callable[[StepInputs], bool] = lambda inputs: True
        self.touched: set[int] = set()  # rows of steps that ran in part
        self.touched_slots: set[int] = set()
        self.touched_edits: set[int] = set()
        self.num_refused = 0  # steps that it had no memory for

    def script(self, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        self.scripts.append((list(prompt), list(outputs)))

    def poison(self, pages: list[int]) -> None:
        for page in pages:
            self.cache[page] = [POISON] * self.page_size

    def poison_slots(self, slots: list[int]) -> None:
        for slot in slots:
            self.slots[slot] = None

    def poison_group(self, group: CacheGroup) -> Callable[[list[int]], None]:
        cache = self.group_caches[group]

        def poison(pages: list[int]) -> None:
            for page in pages:
                cache[page] = [POISON] * self.page_size

        return poison

    def launch(self, inputs: StepInputs) -> FakeHandle:
        self.num_launches += 1
        if self.num_launches == self.fail_at:
            raise RuntimeError("the device is on fire")
        if not self.has_memory(inputs):
            self.num_refused += 1
            self.touched |= set(inputs["rows"].tolist())
            self.touched_edits |= {one.row for one in inputs.edits}
            self.touched_slots |= {slot for slot in inputs["state_write"].tolist() if slot >= 0}
            if not self.launched:
                self._touch()
            raise StepMemoryError("no memory for a step")
        handle = FakeHandle(self, inputs)
        if self.stages > 1:
            for before in self.launched[1 - self.stages :]:
                sampled = before.inputs["sample_index"] >= 0
                assert not set(before.inputs["rows"][sampled].tolist()) & set(inputs["rows"].tolist()), (
                    "an ending that has not run writes a row that this step reads"
                )
        self.launched.append(handle)
        self.most_launched = max(self.most_launched, len(self.launched))
        assert len(self.launched) <= self.stages + 1
        if self.stages > 1:
            assert not inputs.ends_late, "the host has the masks of all that it feeds"
            if inputs.masked:
                handle.copy_masks()
        return handle

    def _check_sharing(self, value: dict[str, Any]) -> bool:
        """Whether the step shares prefixes: then members of a group hold the same pages, and feed one token each."""
        rows = value["sharing"]
        if len(rows) == 1:
            assert not any(rows[0])
            return False
        assert value["q_lens"] == [1] * len(rows)
        own = [0] * len(rows)
        for row in rows:
            members = [one[MEMBER] for one in rows[row[FIRST] : row[FIRST] + row[COUNT]]]
            assert len(set(members)) == len(members) != 1 and (not members or members[0] == row[LEADER])
            for member in members:
                assert own[member] == 0, "a sequence is in one group at most"
                own[member] = row[LENGTH]
                pages = [value["page_table"][one][: row[LENGTH] // self.page_size] for one in (member, row[LEADER])]
                assert row[LENGTH] and pages[0] == pages[1]
        assert [row[OWN] for row in rows] == own and any(own)
        return True

    def run(self, handle: FakeHandle) -> list[int]:
        assert self.launched.pop(0) is handle, "steps run in order"
        inputs = handle.inputs
        layout = self.layout
        assert tuple(inputs) == layout.names
        sizes = {"T": inputs.sizes.T, "B": inputs.sizes.B, "L": inputs.sizes.L, "P": inputs.sizes.P}
        sizes["G"] = inputs.sizes.G
        copied = layout.views(inputs.flat.clone(), inputs.sizes)  # what a device gets: one copy of the flat buffer
        for one in layout.inputs:
            name, dtype = one.name, one.type.dtype
            shape = list(one.type.bind(sizes))
            assert inputs[name].dtype == dtype and list(inputs[name].shape) == shape, name
            assert inputs[name].data_ptr() % dtype.itemsize == 0 and torch.equal(inputs[name], copied[name]), name
        value = {name: view.tolist() for name, view in copied.items()}
        assert 1 <= sizes["T"] <= self.max_tokens and sizes["B"] <= self.max_batch and 1 <= sizes["L"] <= sizes["T"]
        assert len(set(value["rows"])) == sizes["B"] and all(0 <= row < self.max_batch for row in value["rows"])
        assert value["q_starts"] == [0, *itertools.accumulate(value["q_lens"])][:-1] and min(value["q_lens"]) >= 1
        assert all(-1 <= token < self.vocab for row in value["banned"] for token in row)
        expected_seqs = [seq for seq, length in enumerate(value["q_lens"]) for _ in range(length)]
        assert value["token_seqs"] == expected_seqs and len(value["tokens"]) == len(expected_seqs)
        self.most_tokens, self.num_fed = max(self.most_tokens, sizes["T"]), self.num_fed + sizes["T"]
        self.most_sequences = max(self.most_sequences, sizes["B"])

        self.num_shared += self._check_sharing(value)
        self._fed: dict[int, list[int]] = {}  # by sequence, its last token and the drafts behind it
        for one in inputs.recounts:
            assert one.row in value["rows"]
            self.counts[one.row] = set(one.prompt), list(one.generated)
        for one in inputs.edits:
            self.edits[one.row] = one.values
        self.num_edits += len(inputs.edits)
        assert (handle.masks is None) == (not inputs.masked), "the ending runs after it has its masks"
        for row, words in (handle.masks or {}).items():
            self.edits[row] = np.concatenate([words.numpy(), self.edits[row][len(words) :]])
        self.num_masked += len(inputs.masked)
        contexts = [self._write(seq, value) for seq in range(sizes["B"])]
        self._check_pages(contexts, value["q_lens"])
        self._step_states(contexts, value)
        sampled: dict[int, int] = {}
        handle.not_kept = [0] * sizes["B"]
        for seq, last in enumerate(value["sample_index"]):
            if last < 0:
                continue
            assert value["logit_rows"][last] == value["q_starts"][seq] + value["q_lens"][seq] - 1
            fed = self._fed[seq]
            context = self._read(contexts[seq])
            for behind in range(len(fed) - 1, -1, -1) if fed else (0,):
                index, end = last - behind, len(context) - behind
                assert index not in sampled and value["targets"][index] == -1
                assert value["logit_rows"][index] == value["logit_rows"][last] - behind
                known = value["starts"][seq] >= 0  # then the row's last token may be another sequence's
                knobs = self._knobs(value, index, None if known else context[end - 1])
                token = sampled[index] = self._next(context[:end], knobs)
                if (count := value["num_logprobs"][index]) >= 0:
                    handle.rows[index] = hashed_logprobs(context[:end], token, count)
            self._accept(handle, seq, value, [sampled[last - behind] for behind in range(max(0, len(fed) - 1), -1, -1)])
            self._propose(
                value["rows"][seq], self._read(contexts[seq][: self.position[value["rows"][seq]]]), value, last
            )
        assert sorted(sampled) == list(range(len(sampled))), "the sampled rows stand in front"
        self._touch()
        for group, pages in self.scratch.items():
            self.num_in_scratch += sum(page in pages for row in value[group.page_table] for page in row)
            self.poison_group(group)(list(pages))
        self.num_sampled += len(sampled)
        scored = range(len(sampled), sizes["L"])
        if not sampled and value["targets"] == [-1]:
            assert value["logit_rows"] == [0]  # the dummy row
            scored = range(0)
        for index in scored:
            seq, count = value["token_seqs"][value["logit_rows"][index]], value["num_logprobs"][index]
            end = len(contexts[seq]) - (value["q_starts"][seq] + value["q_lens"][seq] - 1 - value["logit_rows"][index])
            assert value["targets"][index] >= 0 and count >= 0
            handle.rows[index] = hashed_logprobs(self._read(contexts[seq][:end]), value["targets"][index], count)
        self.most_scored, self.num_scored = max(self.most_scored, len(scored)), self.num_scored + len(scored)
        return [sampled.get(index, 123) for index in range(sizes["L"])]

    def _touch(self) -> None:
        """Make the rows of a step that ended in between unusable, so that no step can continue from them."""
        for row in self.touched:
            self.position[row] = self.last_token[row] = self.drafts[row] = None
            self.counts[row] = {VOCAB}, [VOCAB]
        self.touched.clear()
        for row in self.touched_edits:
            self.edits.pop(row, None)
        self.touched_edits.clear()
        self.poison_slots(list(self.touched_slots))
        self.touched_slots.clear()

    def _accept(self, handle: FakeHandle, seq: int, value: dict[str, list], taken: list[int]) -> None:
        """Keep the tokens fed as long as they are those that were taken; the row goes on behind the last of them."""
        row, fed = value["rows"][seq], self._fed[seq]
        kept = next((place for place in range(1, len(fed)) if fed[place] != taken[place - 1]), len(fed)) or 1
        self.last_token[row] = max(taken[kept - 1], 0)
        if fed:
            last = value["sample_index"][seq]
            assert all(token < 0 for index in range(last - len(fed) + 1, last + 1) for token in value["banned"][index])
            end = self.position[row]
            handle.not_kept[seq] = len(fed) - kept
            self.position[row] = end - handle.not_kept[seq]
            for position in range(self.position[row], end):
                page = value["page_table"][seq][position // self.page_size]
                self.cache[page][position % self.page_size] = POISON
                for group, cache in self.group_caches.items():
                    page = value[group.page_table][seq][position // self.page_size]
                    cache[page][position % self.page_size] = POISON
            self.num_drafted, self.num_kept = self.num_drafted + len(fed) - 1, self.num_kept + kept - 1

    def _propose(self, row: int, context: list[int], value: dict[str, list], index: int) -> None:
        """Guess what follows: some right, some wrong."""
        if self.num_drafts:
            drafts, knobs = [], replace(self._knobs(value, index, None), counts=None, banned=())
            context = [*context, self.last_token[row]]
            for _ in range(self.num_drafts):
                right = hashed(context, b"draft") % 4 > 0
                drafts.append(max(0, self._next(context, knobs)) if right else hashed(context, b"wrong") % self.vocab)
                context.append(drafts[-1])
            self.drafts[row] = drafts

    def _step_states(self, contexts: list[list[tuple[int, int]]], value: dict[str, list]) -> None:
        """Read the state of each sequence, and leave it with what was fed after it."""
        reads, writes = value["state_read"], value["state_write"]
        if not self.slots:
            assert set(reads) == set(writes) == {-1}
            return
        assert len(set(writes)) == len(writes) and min(writes) >= 0, "two sequences write a slot"
        others = [(read, write) for read, write in zip(reads, writes, strict=True) if read not in (-1, write)]
        assert not {read for read, _ in others} & set(writes), "a sequence writes what another one reads"
        self.most_slots_read = max(self.most_slots_read, len(others))
        after = []
        for places, length, read in zip(contexts, value["q_lens"], reads, strict=True):
            before = [] if read < 0 else self.slots[read]
            assert before is not None, f"slot {read} is read, which holds nothing"
            context = self._read(places)
            assert before == context[: len(context) - length], f"slot {read} holds another state"
            after.append(context)
        for write, state in zip(writes, after, strict=True):
            self.slots[write] = state

    def _check_pages(self, contexts: list[list[tuple[int, int]]], lengths: list[int]) -> None:
        """Nobody has a page that another sequence writes in this step."""
        holders = Counter(page for places in contexts for page in {page for page, _ in places})
        for places, length in zip(contexts, lengths, strict=True):
            assert all(holders[page] == 1 for page, _ in places[-length:]), "two sequences have a page that one writes"
        self.most_shared = max(self.most_shared, *holders.values())

    def _write(self, seq: int, value: dict[str, list]) -> list[tuple[int, int]]:
        """Put a sequence's tokens into the cache; the places of all its tokens so far."""
        row, length, start = value["rows"][seq], value["q_lens"][seq], value["starts"][seq]
        first = value["q_starts"][seq]
        tokens = value["tokens"][first : first + length]
        assert tokens == [*range(-1, -1 - length, -1)] if start == -1 else min(tokens) >= 0
        self._fed[seq] = []
        if start == -1:
            self.num_on_device += 1
            assert self.position[row] is not None and self.last_token[row] is not None, "nothing to continue from"
            start, tokens = self.position[row], [self.last_token[row]]
            if length > 1:
                assert self.drafts[row] is not None and length - 1 <= self.num_drafts, "nothing was proposed"
                assert value["prompt_ends"][seq] < 0, "drafts would be counted"
                tokens += self.drafts[row][: length - 1]
                self._fed[seq] = tokens
        end = start + length
        num_pages = -(-end // self.page_size)
        assert num_pages <= len(value["page_table"][seq]), "the page table is too short"
        pages = value["page_table"][seq][:num_pages]
        assert len(set(pages)) == num_pages, "two places share a page"
        places = [(pages[position // self.page_size], position % self.page_size) for position in range(end)]
        for position, token in zip(range(start, end), tokens, strict=True):
            page, offset = places[position]
            # Positions that were never written hold poison. A sequence may begin again, and then it writes the same.
            assert self.cache[page][offset] in (POISON, (token, position)), "what was written is written over"
            self.cache[page][offset] = (token, position)
        for group, cache in self.group_caches.items():
            self._write_group(cache, group.lifetime, value[group.page_table][seq][:num_pages], start, tokens, places)
        self.position[row], self.last_token[row] = end, None
        self._count(row, start, tokens, value["prompt_ends"][seq])
        return places

    def _write_group(
        self,
        cache: list[list[tuple[int, int]]],
        lifetime: Mask,
        pages: list[int],
        start: int,
        tokens: list[int],
        places: list[tuple[int, int]],
    ) -> None:
        """Put a sequence's tokens into the cache of a group, and read what each sees."""
        size = self.page_size
        held = [page for page in pages if page]
        assert len(set(held)) == len(held), "two places share a page"
        if len(tokens) == 1:
            self.most_group_pages = max(self.most_group_pages, len(held))
        for position, token in enumerate(tokens, start):
            page, offset = pages[position // size], position % size
            assert page, f"position {position} has no page"
            assert cache[page][offset] in (POISON, (token, position)), "what was written is written over"
            cache[page][offset] = (token, position)
        context = self._read(places)
        for query in range(start, start + len(tokens)):
            for position in range(max(0, lifetime.first(query)), query + 1):
                found = cache[pages[position // size]][position % size]
                assert found == (context[position], position), f"{query} reads {found} at {position}"

    def _read(self, places: list[tuple[int, int]]) -> list[int]:
        context: list[int] = []
        for position, (page, offset) in enumerate(places):
            token, written_for = self.cache[page][offset]
            assert written_for == position, f"position {position} reads {token, written_for}"
            context.append(token)
        return context

    def _count(self, row: int, start: int, tokens: list[int], prompt_end: int) -> None:
        if prompt_end < 0:
            return
        if start == 0:
            self.counts[row] = set(), []
        in_prompt, generated = self.counts[row]
        for position, token in zip(range(start, start + len(tokens)), tokens, strict=True):
            if position < prompt_end:
                in_prompt.add(token)
            else:
                generated.append(token)

    def _knobs(self, value: dict[str, list], index: int, last: int | None) -> Knobs:
        names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seeds", "repetition", "frequency", "presence")
        row = value["count_rows"][index]
        counts = None if row < 0 else tuple(tuple(sorted(tokens)) for tokens in self.counts[row])
        banned = tuple(token for token in value["banned"][index] if token >= 0)
        edited = self._edited(value["edit_rows"][index], last)
        return Knobs(*(value[name][index] for name in names), counts, banned + edited[0], edited[1])

    def _edited(self, row: int, last: int | None) -> tuple[tuple[int, ...], tuple[tuple[int, float], ...]]:
        """The tokens that a row of `edits` forbids after the token `last`, and its biases."""
        if row < 0:
            return (), ()
        edits, parts = torch.from_numpy(self.edits[row]), EditParts(self.vocab)
        logits = torch.zeros(self.vocab)
        forbid(logits, edits, torch.tensor(-2 if last is None else last))
        ids, biases = edits[parts.biased : parts.biases], edits[parts.biases : parts.after].view(torch.float32)
        listed = zip(ids[ids >= 0].tolist(), biases[ids >= 0].tolist(), strict=True)
        return tuple((logits < 0).nonzero().flatten().tolist()), tuple(sorted(listed))

    def _next(self, context: list[int], knobs: Knobs) -> int:
        if self.invalid(context):
            return -1
        for prompt, outputs in self.scripts:
            done = len(context) - len(prompt)
            if 0 <= done < len(outputs) and context == prompt + outputs[:done]:
                return outputs[done]
        return hashed_token(context, knobs, self.vocab)
