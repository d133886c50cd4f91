"""The format of gpt-oss: messages with a header that names a channel, and for calls a recipient.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{"key": 1}<|call|>

The prompt ends with `<|start|>assistant`. https://github.com/openai/harmony describes the format.
"""

import re

from ingot.serve.parsers.machine import Machine
from ingot.serve.parsers.names import is_name
from ingot.serve.parsers.source import Malformed, Steps, markers
from ingot.serve.parsers.values import JSON, read_value

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)
_STOPS = markers(START, CHANNEL, *_ENDS)
# A header has a role, a channel, a recipient and a type.
_MAX_HEADER = 600
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony(Machine):
    """Reads messages of gpt-oss. Text outside messages is content.

    reads_calls   whether messages to functions are calls; else they are content
    """

    def __init__(self, *, reads_calls: bool) -> None:
        self._reads_calls = reads_calls
        self._reasoned = self._answered = False
        super().__init__()

    def run(self) -> Steps[None]:
        source = self.source
        source.keep()
        if begin := (yield from source.literal("assistant", " to=", "to=", START, CHANNEL)):
            yield from self.attempt(self._read_message(begin), self._answer)
        else:
            self._answer(source.release())
        while (found := (yield from source.until(_STOPS, self._answer))) is not None:
            source.keep()
            source.take(len(found))
            if found in (START, CHANNEL):
                yield from self.attempt(self._read_message(found), self._answer)

    def _read_message(self, begin: str) -> Steps[None]:
        """Read a message after the begin of its header, up to the marker at its end. Raises Malformed if it is none, or
        no call in JSON."""
        source = self.source
        header, _ = yield from source.short(markers(MESSAGE), _MAX_HEADER)
        source.take(len(MESSAGE))
        header = begin + header
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._reads_calls:
            if not is_name(recipient.group(1)) or (yield from source.blank()) != "{":
                raise Malformed
            self.begin_call(recipient.group(1))
            yield from read_value(source, JSON, self.emit_arguments)
            self.end_call()
            yield from source.blank()
            source.keep()
            return
        source.release()
        channel = _CHANNEL.search(header)
        if channel is not None and channel.group(1) == "analysis":
            if self._reasoned:
                self.emit_reasoning("\n")
            self._reasoned = True
            yield from source.until(_STOPS, self.emit_reasoning)
        else:
            if self._answered:
                self._answer("\n")
            yield from source.until(_STOPS, self._answer)

    def _answer(self, text: str) -> None:
        self._answered = self._answered or bool(text)
        self.emit_content(text)
