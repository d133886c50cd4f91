"""The page's files: served without a key and with its policy, whole, and free of links to other servers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ingot import AsyncLLM
from ingot.serve.http.app import make_app
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.routes.page import page_files
from ingot.serve.served_model import ServedModel

pytestmark = pytest.mark.xdist_group("serve")
KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def client_of(chat_artifact: Path) -> Callable[..., TestClient]:
    """A client of an app whose engine has not started, `client_of(**fields of HttpOptions)`."""

    def make(**options: object) -> TestClient:
        app, _ = make_app(AsyncLLM(chat_artifact), HttpOptions(("tiny",), **options))  # type: ignore[arg-type]
        return TestClient(app, base_url="http://127.0.0.1")

    return make


def test_only_the_page_needs_no_key(client_of: Callable[..., TestClient]) -> None:
    client = client_of(api_keys=("key",))
    for path, content in page_files().items():
        answer = client.get(path)
        assert answer.status_code == 200 and answer.content == content, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in (
        "/ui/nothing.js",
        "/ui/",
        "/ui",
        "/ui/main.js/",
        "/UI/main.js",
        "/ui/..%2fv1/models",
        "/v1/models",
    ):
        assert client.get(path).status_code == 401, path
    for path in ("/", "/ui/main.js"):
        assert client.post(path).status_code == 405
        assert client.get(path, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.get("/ui/nothing.js", headers=KEY).status_code == 404
    assert client.get("/ui/..%2f..%2fapp.py", headers=KEY).status_code == 404


def test_types_of_the_files(client_of: Callable[..., TestClient]) -> None:
    """Browsers refuse scripts and styles of another type."""
    client = client_of()
    kinds = {
        "/": "text/html",
        "/ui/main.js": "text/javascript",
        "/ui/chat.css": "text/css",
        "/ui/icon.svg": "image/svg",
    }
    for path, kind in kinds.items():
        assert client.get(path).headers["content-type"].startswith(kind)


def test_without_the_page(client_of: Callable[..., TestClient]) -> None:
    for options, status in (({}, 404), ({"api_keys": ("key",)}, 401)):
        client = client_of(ui=False, **options)
        assert client.get("/").status_code == client.get("/ui/main.js").status_code == status
    assert client.get("/", headers=KEY).status_code == 404


def test_the_page_is_not_in_the_schema(client_of: Callable[..., TestClient]) -> None:
    paths = client_of().get("/openapi.json").json()["paths"]
    assert "/v1/models" in paths and "/" not in paths and not any(path.startswith("/ui") for path in paths)


def test_the_files_refer_to_each_other_and_to_nothing_else() -> None:
    texts = {path: content.decode() for path, content in page_files().items()}
    linked = set(re.findall(r'(?:href|src)="([^"]*)"', texts["/"]))
    for path, text in texts.items():
        if not path.endswith(".js"):
            continue
        for names, source in re.findall(r'^import \{([^}]*)\} from "\./([\w.]+)";$', text, re.MULTILINE):
            exported = re.findall(r"^export (?:async )?(?:function\*?|class|const) (\w+)", texts[f"/ui/{source}"], re.M)
            for name in (one.strip() for one in names.split(",")):
                assert name in exported and len(re.findall(rf"\b{name}\b", text)) > 1, f"{path}: {name} of {source}"
            linked.add(f"ui/{source}")
    assert linked == {path[1:] for path in texts} - {""}
    for path, text in texts.items():
        assert not re.search(
            r"https?:(?!//www\.w3\.org/2000/svg)|@import|url\(|<style|<script>|\son\w+=|\sstyle=", text
        ), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage\.setItem", text), (
            path
        )


def test_a_model_says_whether_it_has_a_chat_template(
    client_of: Callable[..., TestClient], chat_artifact: Path, tmp_path: Path
) -> None:
    assert client_of().get("/v1/models/tiny").json()["has_chat_template"] is True
    model = ServedModel.open(chat_artifact)
    shutil.copytree(chat_artifact / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    bare = replace(model, artifact=tmp_path)
    assert not bare.has_chat_template and not replace(model, tokenizer=None).has_chat_template
    assert replace(bare, chat_template=tmp_path / "chat.jinja").has_chat_template
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"chat_template": 3}')
    assert not replace(model, artifact=tmp_path).has_chat_template
