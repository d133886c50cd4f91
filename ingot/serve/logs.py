"""Logs of the server and of its engine's process, on stderr: lines of text, or of JSON for collectors."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
# The engine's process inherits the format from the server's.
_VARIABLE = "INGOT_LOG_FORMAT"


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and its `fields` (see `with_fields`)."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def with_fields(**fields: object) -> dict[str, object]:
    """Return the argument `extra` of a logging call that adds fields to a line of JSON. Lines of text lack them."""
    return {"fields": fields}


def set_up_logs(log_format: LogFormat | None, level: int = logging.INFO) -> None:
    """Send logs of this process to stderr, those from `level` on. Child processes get the same format.

    Without `log_format`, the format is that of the parent process, or else text.
    """
    log_format = log_format or ("json" if os.environ.get(_VARIABLE) == "json" else "text")
    os.environ[_VARIABLE] = log_format
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonLines())
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
