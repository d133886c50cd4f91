"""Clients of OpenAI's API that are not OpenAI's own, unchanged: LangChain and GuideLLM.

They are skipped where they are not installed: pip install langchain-openai guidellm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import HttpServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]
PLAN = ("kind=synthetic_text,prompt_tokens=24,output_tokens=8", "kind=sweep,sweep_size=3")


def test_langchain(server: HttpServer) -> None:
    pytest.importorskip("langchain_openai")
    import asyncio

    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    url = f"{server.url}/v1"
    chat = ChatOpenAI(model="tiny", base_url=url, api_key="none", temperature=0, max_tokens=6, stream_usage=True)
    answer = chat.invoke([("system", "Be brief."), ("human", "Hello")])
    assert answer.usage_metadata["output_tokens"] <= 6 and answer.response_metadata["finish_reason"] in (
        "length",
        "stop",
    )
    hello = chat.invoke("Hello").content
    parts = list(chat.stream("Hello"))
    assert "".join(part.content for part in parts) == hello and len(parts) > 1
    assert [part.usage_metadata["total_tokens"] for part in parts if part.usage_metadata]
    assert [one.content for one in chat.batch(["Hello", "Go"])] == [hello, chat.invoke("Go").content]

    async def streamed() -> str:
        return "".join([part.content async for part in chat.astream("Hello")])

    assert asyncio.run(streamed()) == hello
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello").response_metadata["logprobs"]["content"]
    assert len(scored) > 0 and len(scored[0]["top_logprobs"]) == 2
    chain = ChatPromptTemplate.from_messages([("human", "{word}")]) | chat | StrOutputParser()
    assert chain.invoke({"word": "Hello"}) == hello


def test_guidellm_writes_its_report(server: HttpServer, chat_artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("guidellm")
    (data, profile), report = PLAN, tmp_path / "report.json"
    command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={server.url}", "--data", data, "--profile", profile]
    command += ["--constraint", "kind=max_duration,seconds=3", "--output", f"kind=json,path={report}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={chat_artifact / 'tokenizer'}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    totals = [one["metrics"]["request_totals"] for one in json.loads(report.read_text())["benchmarks"]]
    assert len(totals) == 3 and all(one["successful"] > 0 and one["errored"] == 0 for one in totals), totals
