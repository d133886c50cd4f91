"""How the engine process reports a request: by deltas, which have what is new since the last report."""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.runtime.engines.outputs import Logprob
from ingot.runtime.engines.request_group import GroupSequence, RequestGroup
from ingot.serve.engine.messages import Delta, TokenLogprob


@dataclass(frozen=True, slots=True)
class Report:
    """The new part of the output of request `key`; `finished` says whether all its sequences have ended."""

    key: int
    deltas: list[Delta]
    finished: bool


class DeltaReport:
    """Makes the deltas of one request. It is a report for `ingot.runtime.engines.request_group.RequestGroup`.

    key     the number of the request in messages
    count   the number of its sequences
    """

    __slots__ = ("_key", "_prompt_positions", "_reported")

    def __init__(self, key: int, count: int) -> None:
        self._key = key
        self._reported = [_Reported() for _ in range(count)]
        self._prompt_positions = 0

    def __call__(self, group: RequestGroup, finished: bool) -> Report:
        """Return a delta for each sequence that has changed since the last call."""
        deltas: list[Delta] = []
        for index, (sequence, before) in enumerate(zip(group.sequences, self._reported, strict=True)):
            request = sequence.request
            if not before.ended and (len(request.output_ids) > before.tokens or request.end is not None):
                deltas.append(self._delta(group, index, sequence, before))
        return Report(self._key, deltas, finished)

    def _delta(self, group: RequestGroup, index: int, sequence: GroupSequence, before: "_Reported") -> Delta:
        request, logprobs = sequence.request, sequence.logprobs
        tokens, ids = before.tokens, request.output_ids[before.tokens :]
        before.tokens += len(ids)
        text = ""
        if request.text is not None:
            text = request.text.text[before.characters :]
            before.characters += len(text)
        reason, stop = (None, None) if request.end is None else request.end
        before.ended = reason is not None
        prompt_logprobs = None
        if group.prompt_logprobs is not None and index == 0:
            entries = group.prompt_logprobs.entries[self._prompt_positions :]
            self._prompt_positions += len(entries)
            prompt_logprobs = [None if entry is None else _flat(entry) for entry in entries]
        return Delta(
            self._key,
            index,
            ids,
            text,
            None if logprobs is None else [_flat(entry) for entry in logprobs.entries[tokens:] if entry is not None],
            reason,
            stop,
            prompt_logprobs,
            group.sequences[0].request.cached.num_found,
        )


class _Reported:
    """How much of a sequence was reported: its tokens, its characters, and whether its end was."""

    __slots__ = ("characters", "ended", "tokens")

    def __init__(self) -> None:
        self.tokens = self.characters = 0
        self.ended = False


def _flat(entry: Mapping[int, Logprob]) -> list[TokenLogprob]:
    return [(token, one.logprob, one.rank, one.decoded_token) for token, one in entry.items()]
