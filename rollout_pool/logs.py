"""Logs of the package with who and what they are about as fields, as lines of text or of JSON.

``ROLLOUT_POOL_LOG=json`` (or ``text``) in the environment of whoever starts a pool makes the pool and its
actors write what they log, from INFO on, to standard error, which Ray keeps per process. In one's own process
:func:`set_up_logs` does the same, and :class:`JsonFormatter` fits any handler::

    {"time": "2025-01-31T12:00:00.250Z", "level": "WARNING", "logger": "rollout_pool.ledger",
     "message": "a group failed", "pool": "rollout-pool-3f2a", "request_id": "17"}

No line holds the text of a prompt or of a sample.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from rollout_pool.errors import ConfigError

FORM_VARIABLE = "ROLLOUT_POOL_LOG"
POOL_VARIABLE = "ROLLOUT_POOL_NAME"
FORMS = ("json", "text")
FIELDS = ("request_id", "group", "attempt")
"""What a record may carry beside its message, and the ``pool``, ``actor`` and ``rank`` of its process.
``group`` is its number in the pool."""

_of_process: dict[str, str] = {}


def set_up_logs(form: str | None = None, **fields: str) -> None:
    """Log in ``form``, by default as the environment asks; ``fields`` go with every line of this process.

    Where nothing is asked for, nothing is changed but the fields. Raises :class:`ConfigError` for a form that
    is none.
    """
    if POOL_VARIABLE in os.environ:
        _of_process["pool"] = os.environ[POOL_VARIABLE]
    _of_process.update(fields)
    form = _checked(form or os.environ.get(FORM_VARIABLE))
    if form is None:
        return
    logger = logging.getLogger("rollout_pool")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
        logger.removeHandler(handler)
    handler = _Lines(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
    logger.propagate = False


def log_variables() -> dict[str, str]:
    """What another process needs in its environment to log as this one does, and to say whose it is.

    Raises :class:`ConfigError` when the environment asks for a form that is none.
    """
    form = _checked(os.environ.get(FORM_VARIABLE))
    pool = {POOL_VARIABLE: _of_process["pool"]} if "pool" in _of_process else {}
    return {FORM_VARIABLE: form, **pool} if form else {}


def _checked(form: str | None) -> str | None:
    if form and form not in FORMS:
        raise ConfigError(f"{FORM_VARIABLE}: must be {' or '.join(FORMS)}, got {form!r}")
    return form or None


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """One line per record, with its fields at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        return super().formatMessage(record) + fields


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """The fields of a record: its own, and those of its process."""
    own = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
    return {**_of_process, **own}


class _Lines(logging.StreamHandler[Any]):
    """Known as ours, so that it is replaced and not doubled."""
