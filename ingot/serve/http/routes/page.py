"""`/`: a page to chat with the model and watch its metrics; its styles and scripts are at `/ui/`.

The page has no secrets, so it needs no key. It sends the key that its reader types to the other routes.
"""

import mimetypes
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from ingot.serve.http.errors import HttpError
from ingot.web import shared_files

router = APIRouter(include_in_schema=False)
_PAGE = "page.html"
_SHARED = ("base.css", "colours.css", "dom.js", "format.js", "theme.js")

# Only files of this server, and requests only to it. Strings cannot become markup: a script that tried would fail.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # after an update, scripts and page must be of one version
}


@cache
def page_files() -> dict[str, bytes]:
    """Return the content of the page's files by path: "/" for the page, and "/ui/main.js" and so on."""
    own = {file.name: file for file in files("ingot.serve.http").joinpath("page").iterdir()}
    shared = shared_files()
    named = {**own, **{name: shared[name] for name in _SHARED}}
    return {"/" if name == _PAGE else f"/ui/{name}": file.read_bytes() for name, file in named.items()}


@router.get("/")
async def show_page() -> Response:
    """Return the page."""
    return _file("/")


@router.get("/ui/{name}")
async def show_file(name: str) -> Response:
    """Return one of the page's styles or scripts, or answer 404."""
    return _file(f"/ui/{name}")


def _file(path: str) -> Response:
    content = page_files().get(path)
    if content is None:
        raise HttpError(404, f"there is no file {path[:200]}")
    kind = "text/html" if path == "/" else mimetypes.guess_type(path)[0]
    return Response(content, media_type=kind, headers=_HEADERS)
