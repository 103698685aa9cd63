"""One engine as a pool would start it: placed, loaded, tried out, and asked for a few tokens."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayError, RayTaskError

from rollout_pool.actors.tensor_parallel import RankActors
from rollout_pool.config import PoolConfig
from rollout_pool.doctor.check import Checks, failed, of_error, ok
from rollout_pool.errors import RolloutPoolError, one_line
from rollout_pool.preflight import ActorResources
from rollout_pool.requests import resolve_requests
from rollout_pool.types import RolloutGroup, SamplingParams

PROMPT = [0, 1, 2]
NEW_TOKENS = 4


def check_engine(config: PoolConfig, asked: ActorResources, timeout_s: float) -> Checks[None]:
    """The first of the engines stands for all."""
    ranks = RankActors(config, "doctor", asked.amounts, threads=asked.threads, device=asked.device)
    try:
        plan, group = asyncio.run(asyncio.wait_for(_try(ranks), timeout_s))
    except TimeoutError:
        yield failed(
            "engine",
            f"not ready within {timeout_s:.0f} s ({ranks.stage}); it needs {ranks.needs()}",
            "free what it needs, or give it more time with --timeout",
        )
        return
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RolloutPoolError):
            yield of_error("engine", cause)
        else:
            yield failed(
                "engine",
                f"its process was lost while {ranks.stage}: {one_line(cause or error, 200)}",
                "mostly the memory of the node was not enough; `rollout-pool plan` says what is needed",
            )
        return
    finally:
        ranks.kill()
    if group.error is not None:
        yield failed(
            "engine",
            f"loads, but does not roll out: {group.error}",
            "check the weights: run `rollout-pool verify`",
        )
    else:
        yield ok("engine", f"loads, agrees with a plain forward of the model, rolls out; {plan}")


async def _try(ranks: RankActors) -> tuple[str, RolloutGroup]:
    info = await ranks.start()
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    (request,) = resolve_requests([PROMPT], sampling, seed=0)
    return info.memory_plan, await ranks.leader.run.remote(request)
