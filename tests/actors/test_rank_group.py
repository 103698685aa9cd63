"""Ranks that meet, hear the first one, and notice when another is gone. Every rank is a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_pool.actors.rank_group import RankGroup, open_store
from rollout_pool.actors.rank_messages import Announcer, ConnectionLostError, Listener
from rollout_pool.actors.rank_place import place_rank
from rollout_pool.errors import ActorStartError, CapacityError

RANKS = Path(__file__).with_name("ranks.py")
LAUNCHER = Path(__file__).with_name("rank_launcher.py")
LONG = [0, -1, 2**62, *range(1000)]


def run_ranks(case: str, size: int, *, environment: dict[str, str] | None = None, **arguments: Any) -> Any:
    """One result per rank; None for a rank that was killed."""
    command = [sys.executable, "-P", str(LAUNCHER), str(RANKS), case, str(size), json.dumps(arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_hears_every_message_in_order(size: int, tmp_path: Path) -> None:
    results = run_ranks("messages", size, environment={"SECOND_ADDRESS": str(tmp_path / "address")})
    expected = [LONG[:length] for length in (0, 1, 126, 127, 128, len(LONG))]
    assert results[0]["received"] == []
    for rank, result in enumerate(results):
        if rank:
            assert result["received"] == expected * 2
        assert result["shared"] == torch.arange(12.0).reshape(3, 4).tolist()
        assert result["inference"] == [0.0] * 5
        assert result["device"] == "cpu"
        assert result["during"] == {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "LOCAL_SIZE": str(size),
        }
        assert result["after"]["LOCAL_RANK"] == "before"
        assert result["after"]["RANK"] is None


def connect(timeout_s: float) -> tuple[Announcer, Listener]:
    announcer = Announcer("127.0.0.1")
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(announcer.accept, 2, 60)
        listener = Listener("127.0.0.1", announcer.port, announcer.token, 1, timeout_s)
        accepted.result()
    return announcer, listener


def test_an_idle_group_waits_longer_than_a_connection_may_take() -> None:
    announcer, listener = connect(timeout_s=2)
    with ThreadPoolExecutor() as pool:
        received = pool.submit(listener.receive)
        time.sleep(2.5)
        assert not received.done()
        announcer.send([7])
        assert received.result(timeout=30) == [7]
    listener.close()
    announcer.close()


def test_a_sender_does_not_wait_for_its_receivers() -> None:
    announcer, listener = connect(timeout_s=60)
    for number in range(100):
        announcer.send([number] * 50)
    assert [listener.receive()[0] for _ in range(100)] == list(range(100))
    listener.close()
    announcer.close()


def test_a_stranger_at_the_door_is_turned_away() -> None:
    announcer = Announcer("127.0.0.1")
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(announcer.accept, 2, 60)
        stranger = Listener("127.0.0.1", announcer.port, "0" * len(announcer.token), 1, 60)
        with pytest.raises(ConnectionLostError, match="rank 0 is gone"):
            stranger.receive()
        listener = Listener("127.0.0.1", announcer.port, announcer.token, 1, 60)
        accepted.result()
    announcer.send([1, 2])
    assert listener.receive() == [1, 2]
    for end in (stranger, listener, announcer):
        end.close()


def test_followers_notice_the_death_of_rank_0() -> None:
    killed, *followers = run_ranks("first_is_killed", 3)
    assert killed is None
    for rank, result in enumerate(followers, start=1):
        assert f"rank {rank} of 3 lost another rank" in result["error"]
        assert result["after_s"] < 50  # a wait that nobody breaks off takes 60 s or more


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 3)])
@pytest.mark.parametrize("by", ["send", "share"])
def test_rank_0_notices_the_death_of_a_follower(size: int, victim: int, by: str) -> None:
    results = run_ranks("follower_is_killed", size, victim=victim, by=by)
    assert results[victim] is None
    for rank, result in enumerate(results):
        if rank != victim:
            assert f"rank {rank} of {size} lost another rank" in result["error"]
    assert results[0]["after_s"] < 50  # a wait that nobody breaks off takes 60 s or more


def test_a_rank_that_does_not_come_is_named() -> None:
    store, address = open_store("127.0.0.1")
    with pytest.raises(ActorStartError, match="rank 0 of 3 waited 1 s: no sign of rank 1, 2"):
        RankGroup.join(address, 0, 3, "cpu", store=store, timeout_s=1)
    assert not torch.distributed.is_initialized()
    assert "RANK" not in os.environ


def test_a_store_that_is_not_there_is_named() -> None:
    store, address = open_store("127.0.0.1")
    del store
    with pytest.raises(ActorStartError, match=f"rank 1 cannot reach rank 0 at {address}"):
        RankGroup.join(address, 1, 2, "cpu", timeout_s=1)


ONE_HOST = ["a", "a", "a", "a"]
TWO_HOSTS = ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("rank", "hosts", "device", "visible", "place"),
    [
        # One GPU visible per process, whichever it is: always cuda:0.
        (0, ONE_HOST, "cuda", "0", (0, 4, "cuda:0")),
        (3, ONE_HOST, "cuda", "3", (0, 4, "cuda:0")),
        (1, ["a", "a"], "cuda", "GPU-6bd6", (0, 2, "cuda:0")),
        # All visible, and not contiguous: in the order of the ranks on this host.
        (0, ["a", "a"], "cuda", "1,3", (0, 2, "cuda:0")),
        (1, ["a", "a"], "cuda", "1,3", (1, 2, "cuda:1")),
        (1, ["a", "a"], "cuda", None, (1, 2, "cuda:1")),
        (3, TWO_HOSTS, "cuda", "1,3", (1, 2, "cuda:1")),
        (2, TWO_HOSTS, "cuda", "1,3", (1, 2, "cuda:1")),
        # A device that is named wins.
        (1, ["a", "a"], "cuda:0", "1,3", (0, 2, "cuda:0")),
        (3, TWO_HOSTS, "cpu", "1,3", (1, 2, "cpu")),
        (2, ["a", "b", "c"], "cpu", None, (0, 1, "cpu")),
    ],
)
def test_place_of_a_rank(rank: int, hosts: list[str], device: str, visible: str | None, place: Any) -> None:
    found = place_rank(rank, hosts, device, visible, num_devices=2)
    assert (found.local_rank, found.local_size, str(found.device)) == place


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("1,3", 2)])
def test_more_ranks_than_devices_are_refused(visible: str, count: int) -> None:
    with pytest.raises(CapacityError, match=f"sees {count} devices for 4 ranks"):
        place_rank(3, ONE_HOST, "cuda", visible, num_devices=8)
