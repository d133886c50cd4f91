"""Run the requests of a batch file through the server's routes, in this process, and write their answers."""

import asyncio
import logging
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.types import ASGIApp

from ingot.ir.errors import OptionError
from ingot.serve.async_llm import AsyncLLM
from ingot.serve.batch.in_process import post
from ingot.serve.batch.lines import AnswerLine, LineError, answer_line, error_line, read_lines, read_request
from ingot.serve.batch.output_file import OutputFile
from ingot.serve.engine.client import EngineLimits
from ingot.serve.http.app import make_app
from ingot.serve.http.options import HttpOptions

log = logging.getLogger("ingot.serve")
# Requests in flight, as a multiple of the sequences of a step: while one step runs, the next requests are tokenized.
_IN_FLIGHT = 2
# Lines from the first unfinished one on, as a multiple of those in flight. Answers are written in the order of the
# requests, so answers after a long one wait for it.
_AHEAD = 8
# A request whose engine has died is tried again, but not often: it may be the reason.
_TRIES = 2
_OK, _UNAVAILABLE = 200, 503
_PROGRESS_SECONDS = 10.0  # between two lines of the log that say how many requests are done
# The requests in flight bound the engine's queue, so its own limit is off: no request may fail because of the others.
BATCH_LIMITS = EngineLimits(max_waiting=sys.maxsize)


@dataclass
class BatchCounts:
    """How many lines got an answer with status 200, and how many an error."""

    answered: int = 0
    failed: int = 0


def check_paths(input_file: str, output_file: str) -> tuple[Path, Path]:
    """Return both names as paths. Raises OptionError unless they are local and differ, the input is a file, and the
    output has a folder."""
    for name, value in (("--input-file", input_file), ("--output-file", output_file)):
        if "://" in value:
            raise OptionError(f"{name} is {value[:200]!r}", expected="a local file", hint="copy it here first")
    source, target = Path(input_file), Path(output_file)
    if not source.is_file():
        raise OptionError(f"--input-file: {input_file[:200]} is no file", expected="a file with a request in each line")
    if not target.parent.is_dir() or target.is_dir():
        raise OptionError(f"--output-file: {output_file[:200]} cannot be a file", expected="a name in a folder")
    if target.exists() and target.samefile(source):
        raise OptionError("--output-file is the input file", expected="another file")
    return source, target


async def run_batch(llm: AsyncLLM, options: HttpOptions, source: Path, target: Path) -> BatchCounts:
    """Serve the requests of the file `source`, and write their answers to `target` in the same order. `llm` should have
    BATCH_LIMITS.

    The target appears when it is complete. A line that is no request becomes a line with an error. Raises OutputError
    if the target cannot be written, and the error of the engine if it cannot start or dies too often.
    """
    app, _ = make_app(llm, options)
    with OutputFile(target) as output:
        try:
            source_file = source.open("rb")
        except OSError as error:
            raise OptionError(f"{source} cannot be read: {error.strerror}", where="--input-file") from None
        with source_file:
            async with llm:
                return await _Run(llm, app, output).all(source_file)


class _Run:
    """A batch while it runs. `in_flight` requests run at a time."""

    def __init__(self, llm: AsyncLLM, app: ASGIApp, output: OutputFile) -> None:
        self._llm, self._app, self._output = llm, app, output
        self._in_flight = _IN_FLIGHT * llm.engine.max_num_seqs
        self._room = asyncio.Semaphore(self._in_flight)
        self._lines: dict[str, int] = {}  # the line of each custom_id
        self._counts = BatchCounts()
        self._last_progress = time.monotonic()
        self._encode = msgspec.json.Encoder().encode

    async def all(self, source: BinaryIO) -> BatchCounts:
        """Run the requests of a file."""
        tasks: deque[asyncio.Task[AnswerLine]] = deque()
        try:
            for number, line in read_lines(source):
                if len(tasks) >= _AHEAD * self._in_flight:
                    self._write(await tasks.popleft())
                await self._room.acquire()
                tasks.append(asyncio.create_task(self._one(number, line)))
            while tasks:
                self._write(await tasks.popleft())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._counts

    def _write(self, line: AnswerLine) -> None:
        if line.response is not None and line.response.status_code == _OK:
            self._counts.answered += 1
        else:
            self._counts.failed += 1
        self._output.write(self._encode(line))
        if time.monotonic() - self._last_progress > _PROGRESS_SECONDS:
            self._last_progress = time.monotonic()
            log.info("%d answers, %d errors so far", self._counts.answered, self._counts.failed)

    async def _one(self, number: int, line: bytes | None) -> AnswerLine:
        """Return the answer to a line, which the caller has made room for."""
        try:
            request = read_request(line)
            first = self._lines.setdefault(request.custom_id, number)
            if first != number:
                raise LineError(f"custom_id is that of line {first}; expected: one of its own", request.custom_id)
            for _ in range(_TRIES):
                await self._llm.start()  # waits for an engine that is starting again; raises if it is dead
                answer = await post(self._app, request.url, request.body)
                if answer.status_code != _UNAVAILABLE:
                    break
            return answer_line(request.custom_id, answer)
        except LineError as error:
            return error_line(number, error)
        finally:
            self._room.release()
