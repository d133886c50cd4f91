"""A request that an engine has, with all that another engine needs to serve it instead."""

from dataclasses import dataclass, replace

import msgspec

from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.engine.messages import Add, Pool
from ingot.serve.engine.vector_answer import VectorAnswer


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that was sent to an engine and has not ended.

    message         what was sent
    answer          receives what the engine answers
    num_sequences   the sequences that it takes of the engine's room
    moves           how often it went to another engine, because one died
    """

    message: Add | Pool
    answer: DeltaStream | VectorAnswer
    num_sequences: int
    moves: int = 0

    def renumbered(self, key: int) -> "SentRequest":
        """Return the same request for another engine, under the number `key`."""
        return replace(self, message=msgspec.structs.replace(self.message, key=key), moves=self.moves + 1)
