"""A real pool as it is seen from outside: metrics on Ray's endpoint, `rollout-pool top`, progress, logs.

The tests are one story and run in the order of this file: the pool works, loses an actor, and ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray_logs import worker_logs

from rollout_pool import EngineConfig, PoolConfig, RolloutPool, RolloutRequest, SamplingParams, track
from rollout_pool.cli import main
from rollout_pool.commands import top as top_command
from rollout_pool.live.metrics import OF_ACTOR, OF_POOL
from rollout_pool.live.pools import find_pool
from rollout_pool.types import PoolStats

parser = pytest.importorskip(
    "prometheus_client.parser", reason="Ray has no metrics endpoint without ray[default]"
)

SAMPLING = SamplingParams(n=3, max_new_tokens=12, ignore_eos=True, seed=5)
ENDLESS = SamplingParams(n=4, max_new_tokens=120, ignore_eos=True)
SECRET = "the secret of the prompt"
PROMPTS = [SECRET, [7, 8, 9], "", RolloutRequest("two", request_id="mine")]

Scraped = dict[tuple[str, str | None], float]


@pytest.fixture(scope="module")
def quick_reports() -> Iterator[None]:
    """Ray's processes report every two seconds, not every ten, and the pool's write logs as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "2000")
        patch.setenv("RAY_WORKER_TIMEOUT_S", "5")  # after which older versions forget a process
        patch.setenv("ROLLOUT_POOL_LOG", "json")
        yield


@pytest.fixture(scope="module")
def pool(quick_reports: None, cluster: None, tiny_model_dir: str) -> Any:
    config = PoolConfig(
        model=tiny_model_dir,
        num_actors=2,
        cpus_per_actor=1,
        engine=EngineConfig(num_slots=4, max_length=128, deterministic="strict"),
    )
    handle = RolloutPool.options(name="watched").remote(config)
    ray.get(handle.ready.remote(), timeout=300)
    return handle


def scrape() -> Scraped:
    """What the endpoint of this node says about pools, by name and actor."""
    (node,) = ray.nodes()
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, sample.labels.get("actor")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("pool") == "watched"
    }


def expected(stats: PoolStats) -> Scraped:
    found: Scraped = {(f"ray_{metric.name}", None): getattr(stats, metric.source) for metric in OF_POOL}
    for name, actor in zip(stats.actor_names, stats.actors, strict=True):
        found |= {(f"ray_{metric.name}", name): getattr(actor, metric.source) for metric in OF_ACTOR}
    return found


def until(is_there: Callable[[], Any]) -> Any:
    """What is there at last. An endpoint that does not answer yet is none."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            if found := is_there():
                return found
        assert time.monotonic() < deadline
        time.sleep(0.2)


def top(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["top", *arguments]) == 0
    return capsys.readouterr().out


def view(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(top(capsys, "--json"))
    return found


def test_ray_s_endpoint_has_exactly_the_pool_s_counters(pool: Any, tiny_model_dir: str) -> None:
    groups = ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=120)
    assert [group.error is None for group in groups] == [True, True, False, True]
    ray.get(pool.sync_weights.remote(tiny_model_dir), timeout=120)
    # Those of an actor that is slow to answer are left out.
    stats = until(lambda: len((found := ray.get(pool.stats.remote(), timeout=60)).actors) == 2 and found)
    assert (stats.returned, stats.failed, stats.weight_version, stats.weight_syncs) == (3, 1, 1, 1)
    assert sum(actor.new_tokens for actor in stats.actors) == 3 * 3 * 12
    assert stats.weight_sync_s > 0
    scraped: Scraped = {}
    until(lambda: scraped.update(scrape()) or scraped == expected(stats))


def test_top_shows_the_work_under_way(pool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # Groups that are handed over in the last minute tell how long the rest takes.
    ray.get(pool.rollout.remote(PROMPTS, SAMPLING), timeout=120)
    work = pool.rollout.remote([f"prompt {number}" for number in range(2_000)], ENDLESS)

    def complete() -> dict[str, Any] | None:
        found = view(capsys)
        answered = all(actor["stats"] for actor in found["actors"])
        return found if answered and found["tokens_per_s"] and found["eta_s"] else None

    seen = until(complete)
    assert seen["stats"]["in_flight"] > seen["stats"]["queued"] > 0
    assert [actor["name"] for actor in seen["actors"]] == ["actor-0", "actor-1"]
    assert seen["actors"][0]["stats"]["num_slots"] == 4
    under_way = ("watched: ", "in flight (", "done in about ", " 4/4 ", "weights 1")

    def shown() -> bool:  # an actor's slots are empty between two groups
        text = top(capsys, "--once", "--name", "watched")
        return all(part in text for part in under_way)

    until(shown)
    ray.cancel(work)


def test_a_pool_is_found_by_name_among_other_actors_and_pools(
    pool: Any, capsys: pytest.CaptureFixture[str], tiny_model_dir: str
) -> None:
    class NoPool:
        pass

    other = ray.remote(num_cpus=0)(NoPool).options(name="no-pool").remote()
    assert ray.get(find_pool().num_actors.remote()) == 2
    second = RolloutPool.remote(PoolConfig(model=tiny_model_dir, cpus_per_actor=1))
    until(lambda: len(ray.util.list_named_actors()) == 3)
    assert main(["top", "--once"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("rollout-pool top: more than one pool is meant")
    assert "rollout-pool-" in message
    assert "no-pool" not in message
    assert "watched: " in top(capsys, "--once", "--name", "watched")
    ray.kill(second)
    ray.kill(other)
    until(lambda: ray.util.list_named_actors() == ["watched"])
    assert main(["top", "--name", "missing"]) == 2
    assert "there is no pool 'missing'; there are: watched (namespace " in capsys.readouterr().err


def test_progress_of_a_stream_counts_its_groups_and_shows_the_pool(pool: Any) -> None:
    lines = io.StringIO()
    groups = list(track(pool.stream.remote(PROMPTS, SAMPLING), total=4, pool=pool, stream=lines))
    assert sorted(group.index for group in groups) == [0, 1, 2, 3]
    assert lines.getvalue().splitlines()[-1].startswith("4/4 groups")

    @ray.remote(num_cpus=0)
    def trainer(pool: Any, name: str) -> str:
        lines = io.StringIO()
        prompts = [[5], [6]]
        list(track(pool.stream.remote(prompts), total=2, description=name, stream=lines))
        return lines.getvalue()

    texts = ray.get([trainer.remote(pool, f"groups of {name}") for name in "ab"], timeout=120)
    # Slow ones have earlier lines, too.
    assert [text.splitlines()[-1] for text in texts] == ["2/2 groups of a", "2/2 groups of b"]


def test_a_lost_actor_is_counted_and_named_and_holds_no_slots(
    pool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    leaders = pool.__ray_call__.remote(lambda self: [m.handle for m in self._crew.members.values()])
    victim = ray.get(leaders)[0]
    # Its engine stands still, so that it cannot be done with its groups before it is killed.
    ray.get(victim.__ray_call__.remote(lambda self: bool(self._engine.call(lambda _: time.sleep(600)))))
    work = pool.rollout.remote(
        [RolloutRequest([9, 9, number], request_id=f"r{number}") for number in range(4)], ENDLESS
    )
    until(lambda: view(capsys)["stats"]["in_flight"] == 4)
    ray.kill(victim)
    assert all(group.error is None for group in ray.get(work, timeout=120))
    seen = until(lambda: (found := view(capsys))["stats"]["num_actors"] == 2 and found)
    assert seen["stats"]["actors_lost"] == 1
    assert seen["stats"]["replayed"] >= 1
    assert sum(actor["times_lost"] for actor in seen["actors"]) == 1
    assert any("was lost and is replaced" in line for line in seen["warnings"])
    assert "lost 1 times" in top(capsys, "--once")

    def slots() -> dict[str | None, float]:
        return {actor: value for (name, actor), value in scrape().items() if name == "ray_rollout_pool_slots"}

    present = {actor["name"]: 4 for actor in seen["actors"]}
    until(lambda: {actor: value for actor, value in slots().items() if value} == present)


def test_logs_say_which_pool_actor_and_request_and_never_what_it_said(pool: Any) -> None:
    texts = worker_logs().values()
    lines = [json.loads(line) for text in texts for line in text if line.startswith('{"time"')]
    replayed = [line for line in lines if "runs again" in line["message"]]
    assert {line["pool"] for line in lines} == {"watched"}
    assert {line["request_id"] for line in replayed} <= {"r0", "r1", "r2", "r3"}
    assert replayed
    assert any(line["request_id"] == 2 for line in lines if "failed" in line["message"])
    assert any("was lost and is replaced" in line["message"] for line in lines)
    assert not any(SECRET in line for text in texts for line in text)


def test_a_view_on_a_terminal_and_the_metrics_end_with_the_pool(
    pool: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = top_command._look, []

    def look_and_kill(handle: Any) -> Any:
        looks.append(look(handle))
        if len(looks) == 3:
            ray.kill(pool)
        return looks[-1]

    until(scrape)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(top_command, "_look", look_and_kill)
    shown = top(capsys, "--interval", "0.1")
    assert shown.count("watched: ") > 1
    assert "the pool has ended" in shown
    until(lambda: not scrape())
    with pytest.raises(Exception, match="no pool"):
        find_pool()
