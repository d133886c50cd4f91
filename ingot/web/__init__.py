"""Styles and scripts that Ingot's pages share: the report, and the chat page of the HTTP server."""

from importlib.resources import files
from importlib.resources.abc import Traversable


def shared_files() -> dict[str, Traversable]:
    """Return the shared files by name, such as "dom.js". A page puts them next to its own, so that modules import
    them as "./dom.js"."""
    return {file.name: file for file in files("ingot.web").joinpath("page").iterdir()}
