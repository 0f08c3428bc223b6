"""TextFormatter and JsonFormatter."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from quire.cluster.os_utils.logs import JsonFormatter, TextFormatter


def record(message: str = "it %s", *args: Any, at: float = 0.5, **extra: Any) -> logging.LogRecord:
    fields = {"name": "quire.x", "levelno": logging.INFO, "levelname": "INFO", "msg": message, "args": args}
    made = logging.makeLogRecord(fields | extra)
    made.created, made.msecs = at, at % 1 * 1000
    return made


def test_json_line_has_the_message_and_the_extra_fields() -> None:
    line = JsonFormatter().format(record("took %d\nlines", 2, request_id="r", tenant="ä"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500Z", "level": "info", "logger": "quire.x", "message": "took 2\nlines",
        "request_id": "r", "tenant": "ä",
    }  # fmt: skip


def test_json_line_has_the_traceback_and_values_of_any_type() -> None:
    try:
        raise KeyError("nothing")
    except KeyError:
        failed = record("failed", exc_info=sys.exc_info(), value={1, 2}.__class__)
    fields = json.loads(JsonFormatter().format(failed))
    assert "KeyError: 'nothing'" in fields["exception"]
    assert fields["value"] == "<class 'set'>"


def test_text_of_a_caller_cannot_look_like_a_record_or_control_the_terminal() -> None:
    line = TextFormatter("%(levelname)s %(message)s").format(
        record("request %s", "a\nERROR b\r\x1b[2J\x9b\u2028\tä")
    )
    assert line == "INFO request a\n  ERROR b\\r\\x1b[2J\\x9b\\u2028\tä"
