"""The names of metrics: those that a dashboard and the documentation use exist, and none is left out."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from rollout_pool.live.metrics import OF_ACTOR, OF_POOL
from rollout_pool.types import EngineStats, PoolStats

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "configs" / "grafana" / "rollout_pool.json"
NAMES = {f"ray_{metric.name}" for metric in (*OF_POOL, *OF_ACTOR)}


def test_every_metric_has_a_name_of_its_own_and_a_counter_behind_it() -> None:
    assert len(NAMES) == len(OF_POOL) + len(OF_ACTOR)
    of_pool = {field.name for field in dataclasses.fields(PoolStats)}
    of_actor = {field.name for field in dataclasses.fields(EngineStats)}
    assert {metric.source for metric in OF_POOL} <= of_pool
    assert {metric.source for metric in OF_ACTOR} <= of_actor
    assert all(re.fullmatch("rollout_pool_[a-z_]+", metric.name) for metric in (*OF_POOL, *OF_ACTOR))


def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_them() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels: list[dict[str, Any]] = dashboard["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"[a-z_]*rollout_pool[a-z_]*", query)}
    assert asked == NAMES
    assert all(query.count("(") == query.count(")") for query in queries)
    assert all(query.count('{pool=~"$pool"}') == query.count("ray_rollout_pool_") for query in queries)
    growing = {f"ray_{metric.name}" for metric in (*OF_POOL, *OF_ACTOR) if metric.is_total}
    for name in growing - {"ray_rollout_pool_actors_lost_total"}:
        assert all(re.search(rf"(rate|increase)\({name}\{{", query) for query in queries if name in query), (
            name
        )
    (variable,) = (entry for entry in dashboard["templating"]["list"] if entry["name"] == "pool")
    assert variable["definition"] == "label_values(ray_rollout_pool_actors, pool)"
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in panels]
    assert len(set(places)) == len(places)
    assert all(x + w <= 24 for x, _, w, _ in places)


def test_the_documentation_lists_every_metric() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(rollout_pool_[a-z_]+)`", text))
    assert listed == {metric.name for metric in (*OF_POOL, *OF_ACTOR)}
