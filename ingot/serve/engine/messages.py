"""The messages between the server process and the engine process: msgpack frames over a Unix socket pair.

A frame is a length of 4 bytes, little-endian, and that many bytes of msgpack. A process that receives a frame decodes
it into one of the classes of its union, `ToEngine` or `ToServer`. Nothing in a message can run code.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from ingot.runtime.engines.outputs import FinishReason

HEADER_BYTES = 4
# A prompt of a million tokens takes 5 MB. A longer frame is a damaged one.
MAX_FRAME_BYTES = 1 << 30

# The log-probability of one token: its id, the log-probability, its rank, and its text (None without a tokenizer).
TokenLogprob = tuple[int, float, int, str | None]


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base class. A message is an array of its class name and its fields."""


class Start(Message):
    """Load an artifact folder. `options` are arguments of `LLM`. This is the first message to an engine.

    adapters   name -> folder of the LoRA adapters to load
    """

    artifact: str
    options: dict[str, Any]
    adapters: dict[str, str] = {}


class Add(Message):
    """Serve a request.

    key      the number of the request in later messages
    params   the fields of SamplingParams that differ from their defaults
    stream   False: the engine sends one delta for each sequence, at the end
    adapter  the name of a LoRA adapter that is loaded; None: the model alone
    """

    key: int
    prompt_ids: list[int]
    params: dict[str, Any]
    stream: bool
    priority: int
    cache_salt: str | None
    adapter: str | None = None


class Pool(Message):
    """Compute the vector of a prompt. The engine answers with a `Vector` in a `Step`, or with `Refused`.

    key      the number of the request in later messages
    params   the fields of PoolingParams that differ from their defaults
    """

    key: int
    prompt_ids: list[int]
    params: dict[str, Any]
    priority: int
    cache_salt: str | None


class Abort(Message):
    """End a request, and free its pages when the step in flight is complete. An unknown key has no effect."""

    key: int


class ResetPrefixCache(Message):
    """Empty the prefix cache. The engine answers with `PrefixCacheReset`."""


class Order(Message):
    """Do what an operator wants. The engine answers with `Done` of the same number.

    number     identifies the order in its answer
    action     pause: launch no further step, and keep all requests until "resume". New requests wait too.
               drain: pause when the running requests have ended; new requests wait.
               resume: go on after a pause. profile: record what PyTorch runs, until "stop_profile".
               stop_profile: write the recording to the file `argument`.
    argument   a path for "stop_profile"; otherwise empty
    """

    number: int
    action: Literal["pause", "drain", "resume", "profile", "stop_profile"]
    argument: str = ""


class LoadAdapter(Message):
    """Load a LoRA adapter from a PEFT folder while requests run. The engine answers with `Done` of the same number."""

    number: int
    name: str
    folder: str


class UnloadAdapter(Message):
    """Forget a LoRA adapter. Requests that use it run to their end. The engine answers with `Done`."""

    number: int
    name: str


def adapter_message(number: int, name: str, folder: str | None) -> LoadAdapter | UnloadAdapter:
    """Return the message to load an adapter, or to unload it if `folder` is None."""
    return UnloadAdapter(number, name) if folder is None else LoadAdapter(number, name, folder)


class VectorKind(Message):
    """Describes the vectors that a model returns for prompts.

    width     elements of a vector
    unit      whether a vector has length 1 unless its request says otherwise
    classes   whether a vector has the logits of classes, one for each element, and is no embedding vector
    """

    width: int
    unit: bool
    classes: bool


class Ready(Message):
    """The engine has loaded the artifact. `timings` are the seconds of each phase, as in `LLM.timings`.

    max_num_seqs   sequences that a step can hold
    vectors        what the model's vectors are; None for a model that generates tokens
    max_loras      LoRA adapters on the device at once; 0: the engine serves none
    failed         name -> error of the LoRA adapters that could not be loaded, from `ingot.error_text.encode_error`
    """

    max_num_seqs: int
    timings: dict[str, float]
    vectors: VectorKind | None = None
    max_loras: int = 0
    failed: dict[str, dict[str, str]] = {}


class Failed(Message):
    """The engine cannot start, or a step failed; it ends. `error` is from `ingot.error_text.encode_error`."""

    error: dict[str, str]


class Refused(Message):
    """The engine does not serve a request, for the reason in `error` (from `ingot.error_text.encode_error`)."""

    key: int
    error: dict[str, str]


class PrefixCacheReset(Message):
    """The answer to `ResetPrefixCache`: whether the prefix cache is empty now. It is not while requests run."""

    done: bool


class Done(Message):
    """The answer to `Order`. `error` is from `ingot.error_text.encode_error`, or None if it is done."""

    number: int
    error: dict[str, str] | None


class Vector(Message):
    """The vector of a prompt.

    values          its elements as float32, little-endian; empty if `finish_reason` is "error"
    finish_reason   "stop", or "error" if numbers were not finite or the device had no memory
    stop_reason     the text of an error, or None
    num_cached      tokens of the prompt that were found in the prefix cache
    """

    key: int
    values: bytes
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached: int | None


class Delta(Message):
    """The part of a sequence that is new since the last delta of the same key and index.

    index             0..n-1 within the request
    token_ids         new tokens
    text              new text
    logprobs          for each new token the requested log-probabilities, the token's own first; None if not requested
    finish_reason     None while the sequence runs
    stop_reason       the stop string or stop token id that ended it, or the text of an error
    prompt_logprobs   new entries of the prompt's log-probabilities, only with index 0; the first token's entry is None
    num_cached        tokens of the prompt that were found in the prefix cache; None while the request waits
    """

    key: int
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    num_cached: int | None = None


class Stats(Message):
    """Counts of the engine at the end of a step; fields as in `Occupancy` and `PrefixCacheStats`.

    steps, seconds_waited   as `steps_ended` and `seconds_waited` of `ServingLoop`
    running_adapters, waiting_adapters
        the names of the LoRA adapters that requests use, and of those that requests wait for
    """

    waiting: int = 0
    running: int = 0
    pages_held: int = 0
    pages_releasing: int = 0
    pages_kept: int = 0
    pages: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    steps: int = 0
    seconds_waited: float = 0.0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    forced_tokens: int = 0


class Step(Message):
    """The outputs of one step, and the counts after it. An engine also sends one without deltas, as a sign of life."""

    deltas: list[Delta]
    stats: Stats
    vectors: list[Vector] = []


ToEngine = Start | Add | Pool | Abort | ResetPrefixCache | Order | LoadAdapter | UnloadAdapter
ToServer = Ready | Failed | Refused | PrefixCacheReset | Done | Step

_ENCODER = msgspec.msgpack.Encoder()
ENGINE_DECODER: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
SERVER_DECODER: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)


def frame(message: Message) -> bytes:
    """Return the frame of a message."""
    buffer = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return bytes(buffer)


class Frames:
    """Splits received bytes into the contents of frames. It stores the bytes of an incomplete frame."""

    def __init__(self) -> None:
        self._received = bytearray()

    def split(self, received: bytes) -> Iterator[bytes]:
        """Add received bytes, and yield the contents of each frame that is complete. Raises ValueError for a frame
        longer than MAX_FRAME_BYTES."""
        self._received += received
        begin = 0
        try:
            while len(self._received) - begin >= HEADER_BYTES:
                size = int.from_bytes(self._received[begin : begin + HEADER_BYTES], "little")
                if size > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                end = begin + HEADER_BYTES + size
                if len(self._received) < end:
                    return
                content = bytes(self._received[begin + HEADER_BYTES : end])
                begin = end
                yield content
        finally:
            del self._received[:begin]
