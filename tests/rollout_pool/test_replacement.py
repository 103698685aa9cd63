"""Who replaces a lost actor, how often it is tried, and when the pool gives up. No processes: only the policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from rollout_pool import ActorStartError, NoRoomError, PoolConfig, RolloutPoolError
from rollout_pool.actors.progress import IDLE, Progress
from rollout_pool.actors.rollout_actor import ActorInfo
from rollout_pool.background import TaskSet
from rollout_pool.recovery import Crew
from rollout_pool.simulation.clock import run_virtually

START_TIMEOUT_S = 0.2


class Ranks:
    """Processes that start as ``outcome`` says: they do, they fail, or they find no room."""

    def __init__(self, name: str, outcome: str | Exception) -> None:
        self.name, self._outcome = name, outcome
        self.stage = "processes"
        self.is_killed = False

    async def start(self) -> ActorInfo:
        if self._outcome == "no room":
            await asyncio.sleep(60)
        self.stage = "loading"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return ActorInfo(self.name, 1, "cpu", 1, "")

    async def progress(self) -> Progress:
        if self.is_killed:
            raise ActorDiedError
        return Progress(0, 0, False, IDLE)

    def kill(self) -> None:
        self.is_killed = True

    def needs(self) -> str:
        return "1 CPU of which 0 of 1 are free"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_pool.recovery.LONGEST_PAUSE_S", 0.01)


class Scene:
    """A crew, the processes that were made for it, and what it said when it gave up."""

    def __init__(self, outcomes: dict[str, str | Exception], joining: Any, **keys: Any) -> None:
        self.made: list[Ranks] = []
        self.given_up: list[RolloutPoolError] = []
        self.background: list[BaseException] = []
        config = PoolConfig(model="m", start_timeout_s=START_TIMEOUT_S, **keys)
        self.tasks = TaskSet(self.background.append)

        def new_ranks(name: str) -> Any:
            self.made.append(Ranks(name, outcomes.get(name, "starts")))
            return self.made[-1]

        self.crew = Crew(config, new_ranks, self.tasks, lambda member: None, self.given_up.append, joining)

    @property
    def names(self) -> list[str]:
        return [ranks.name for ranks in self.made]

    def lose(self, name: str) -> None:
        self.crew.lose(self.crew.members[name], "the test")


@asynccontextmanager
async def join(*_: Any) -> AsyncIterator[int]:
    yield 0


def play(
    story: Callable[[Scene], Coroutine[Any, Any, None]], outcomes: Any, joining: Any = join, **keys: Any
) -> Scene:
    async def run() -> Scene:
        async with asyncio.timeout(10):
            scene = Scene(outcomes, joining, **keys)
            await scene.crew.start()
            await story(scene)
            scene.tasks.cancel_all()
            return scene

    scene = run_virtually(run())
    assert scene.background == []
    return scene


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


DIED = ActorDiedError()


def test_a_replacement_that_fails_is_tried_again_and_the_failures_end_with_a_success() -> None:
    async def story(scene: Scene) -> None:
        scene.lose("actor-0")
        await until(lambda: "actor-0.3" in scene.crew.members)
        scene.lose("actor-0.3")  # a new loss has all its tries
        await until(lambda: "actor-0.6" in scene.crew.members)

    failing = {f"actor-0.{number}": DIED for number in (1, 2, 4, 5)}
    scene = play(story, failing)
    assert scene.names == ["actor-0", *(f"actor-0.{number}" for number in range(1, 7))]
    assert [ranks.is_killed for ranks in scene.made] == [True] * 6 + [False]
    assert scene.given_up == []


def test_a_place_is_given_up_after_its_tries_and_the_pool_with_its_last_place() -> None:
    async def story(scene: Scene) -> None:
        scene.lose("actor-0")
        await until(lambda: len(scene.made) == 5)
        await asyncio.sleep(0.05)
        assert list(scene.crew.members) == ["actor-1"]
        assert scene.given_up == []
        scene.lose("actor-1")
        await until(lambda: bool(scene.given_up))

    failing = {f"actor-{place}.{number}": DIED for place in (0, 1) for number in (1, 2, 3)}
    scene = play(story, failing, num_actors=2)
    assert len(scene.made) == 8
    assert all(ranks.is_killed for ranks in scene.made)
    (error,) = scene.given_up
    assert isinstance(error, ActorStartError)
    assert str(error).startswith("actor-1.3 died while it started: ")


def test_while_there_is_no_room_the_pool_goes_on_with_fewer_and_then_grows_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(scene: Scene) -> None:
        scene.lose("actor-0")
        await until(lambda: "actor-0.5" in scene.crew.members)

    short = {f"actor-0.{number}": "no room" for number in range(1, 5)}  # more often than a failure is tried
    scene = play(story, short, num_actors=2)
    assert scene.given_up == []
    assert "it needs 1 CPU of which 0 of 1 are free" in caplog.text
    assert "the pool goes on with 1 actors" in caplog.text


def test_a_pool_without_actors_and_without_room_gives_up_within_its_deadline() -> None:
    async def story(scene: Scene) -> None:
        began = asyncio.get_running_loop().time()
        scene.lose("actor-0")
        await until(lambda: bool(scene.given_up))
        assert asyncio.get_running_loop().time() - began < 2 * START_TIMEOUT_S

    scene = play(story, {"actor-0.1": "no room"})
    assert isinstance(scene.given_up[0], NoRoomError)


def test_an_actor_that_dies_while_it_gets_the_weights_is_tried_again() -> None:
    @asynccontextmanager
    async def joining(name: str, *_: Any) -> AsyncIterator[int]:
        if name == "actor-0.1":
            raise ActorStartError(f"{name} did not get the weights of version 7")
        yield 7

    async def story(scene: Scene) -> None:
        scene.lose("actor-0")
        await until(lambda: "actor-0.2" in scene.crew.members)
        assert scene.crew.members["actor-0.2"].weight_version == 7

    assert play(story, {}, joining).given_up == []
