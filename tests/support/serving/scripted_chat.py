"""The HTTP application over a model whose text a test gives, without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from ingot.serve.async_llm import AsyncLLM
from ingot.serve.engine.messages import Delta
from ingot.serve.http.app import make_app
from ingot.serve.http.options import HttpOptions

# Its markers are those of Hermes' calls and of Qwen's reasoning.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}<end>{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | items | list }}{% endfor %}
{%- endfor %}{# <think></think> #}{% if add_generation_prompt %}assistant: {% endif %}"""
# It writes tools into the prompt, and has the marker of Hermes' calls.
TOOLS_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"


class Script:
    """Deltas in place of an engine's."""

    engine = 0
    failed = False

    @property
    def ended(self) -> bool:
        return not self._deltas

    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = deltas

    async def __anext__(self) -> list[Delta]:
        if not self._deltas:
            raise StopAsyncIteration
        return [self._deltas.pop(0)]

    def close(self) -> None:
        pass


class Chat:
    """The application over a model whose engine says `text`, in pieces of `size` characters if it streams."""

    def __init__(self, artifact: Path, template: Path | None, **options: Any) -> None:
        self.llm = AsyncLLM(artifact, chat_template=template)
        self.app, _ = make_app(self.llm, HttpOptions(model_names=("tiny",), allowed_hosts=("server",), **options))
        self.text, self.size, self.reason = TEXT, 5, "stop"
        self.seen: list[Any] = []
        self.llm.submit = self._submit  # type: ignore[method-assign]

    def _submit(self, prompt: Any, params: Any, *, stream: bool, priority: int, adapter: str | None) -> Any:
        self.seen.append(SimpleNamespace(prompt=prompt, params=params))
        size = self.size if stream else len(self.text)
        pieces = [self.text[begin : begin + size] for begin in range(0, len(self.text), size)]
        deltas = [Delta(0, 0, [1], piece) for piece in pieces]
        deltas[-1].finish_reason = self.reason
        return Script(deltas)

    def body(self, path: str) -> dict[str, Any]:
        """The fields that each request of a route has."""
        return {"input": "hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 64}

    def post(self, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.post(path, json={**self.body(path), **fields})

        return asyncio.run(send())

    def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
        """The data of the events of a stream."""
        lines = self.post(path, stream=True, **fields).text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and "[DONE]" not in line]


MakeChat = Callable[..., Chat]


def chat_maker(artifact: Path, folder: Path) -> MakeChat:
    """Makes applications over an artifact, with a template. None: the artifact's."""

    def make(template: str | None = TEMPLATE, **options: Any) -> Chat:
        file = None
        if template is not None:
            file = folder / "chat.jinja"
            file.write_text(template)
        return Chat(artifact, file, **options)

    return make
