"""The contents of executables.json: documents that have many values in common, each of which is written once.

An executable's document is the value whose canonical text has the executable's key as its SHA-256
(`ingot.compile.identity`). All executables of a backend have equal sources and tools. The file is

    {"shared": {FIELD: [VALUE, ...]}, "documents": {KEY: {FIELD: INDEX or VALUE}}}

A field in "shared" has an index of its values in each document that has the field. Other fields have their values.
"""

from collections.abc import Mapping
from typing import Any

from ingot.ir.json_text import dump_json

Documents = Mapping[str, Mapping[str, Any]]


def encode_documents(documents: Documents) -> dict[str, Any]:
    """Return documents, by key, as the value of executables.json. Fields of objects are shared if a value repeats."""
    values: dict[str, dict[str, int]] = {}
    shared: dict[str, list[Any]] = {}
    fields = {name for one in documents.values() for name, value in one.items() if isinstance(value, dict)}
    for name in sorted(fields):
        given = [one[name] for one in documents.values() if name in one]
        distinct = {dump_json(value): value for value in given}
        if len(distinct) < len(given):
            values[name] = {text: index for index, text in enumerate(distinct)}
            shared[name] = list(distinct.values())
    return {
        "shared": shared,
        "documents": {
            key: {name: values[name][dump_json(value)] if name in values else value for name, value in document.items()}
            for key, document in documents.items()
        },
    }


def decode_documents(stored: object) -> dict[str, dict[str, Any]]:
    """Return the documents of executables.json, by key. Raises ValueError if the file is malformed."""
    if not isinstance(stored, dict) or stored.keys() != {"shared", "documents"}:
        raise ValueError('expected the fields "shared" and "documents"')
    shared, documents = stored["shared"], stored["documents"]
    if not isinstance(shared, dict) or not all(isinstance(one, list) for one in shared.values()):
        raise ValueError('"shared" has no lists of values')
    if not isinstance(documents, dict) or not all(isinstance(one, dict) for one in documents.values()):
        raise ValueError('"documents" has no documents')
    return {
        key: {name: _value(value, shared[name], name) if name in shared else value for name, value in one.items()}
        for key, one in documents.items()
    }


def _value(index: object, values: list[Any], name: str) -> Any:
    if type(index) is not int or not 0 <= index < len(values):
        raise ValueError(f"no value {index!s:.40} of {name:.40}")
    return values[index]
