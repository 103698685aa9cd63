"""Log records as lines: what they carry, and that nothing changes where nothing is asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from rollout_pool import ConfigError, logs

LOGGER = logging.getLogger("rollout_pool.somewhere")


@pytest.fixture(autouse=True)
def package_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package's logger is put back afterwards."""
    monkeypatch.setattr(logs, "_of_process", {})
    logger = logging.getLogger("rollout_pool")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_a_json_line_has_the_fields_of_the_process_and_of_the_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.set_up_logs("json", pool="p", actor="actor-1")
    LOGGER.info("sent to %s", "you", extra={"request_id": "ä", "group": 7})
    try:
        raise ValueError("broken")
    except ValueError:
        LOGGER.exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    stamp = first.pop("time")
    assert stamp.endswith("Z")
    assert first == {
        "level": "INFO",
        "logger": "rollout_pool.somewhere",
        "message": "sent to you",
        "pool": "p",
        "actor": "actor-1",
        "request_id": "ä",
        "group": 7,
    }
    assert second["exception"].endswith("ValueError: broken")


def test_text_lines_end_with_the_fields_and_setting_up_again_doubles_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.set_up_logs("json")
    logs.set_up_logs("text", pool="p")
    LOGGER.warning("slow", extra={"request_id": 3})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING slow pool=p request_id=3")


def test_nothing_changes_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_POOL_LOG", raising=False)
    before = list(logging.getLogger("rollout_pool").handlers)
    logs.set_up_logs(pool="p")
    assert logging.getLogger("rollout_pool").handlers == before
    assert logs.log_variables() == {}


def test_what_an_actor_needs_to_log_alike_is_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_POOL_LOG", "json")
    logs.set_up_logs(pool="p")
    assert logs.log_variables() == {"ROLLOUT_POOL_LOG": "json", "ROLLOUT_POOL_NAME": "p"}
    monkeypatch.setenv("ROLLOUT_POOL_LOG", "xml")
    with pytest.raises(ConfigError, match="ROLLOUT_POOL_LOG: must be json or text, got 'xml'"):
        logs.log_variables()
