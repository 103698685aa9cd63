"""Real ranks for the tests: ``python ranks.py CASE SIZE [JSON arguments]`` prints one JSON result per rank.

Not collected by pytest. The launcher starts every rank as a process of its own, rank 0 first, since it
opens the store; a case is a function here that each of them runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from rollout_pool.actors.rank_group import RankGroup, RankLostError, open_store

MARK = "result: "
LONG = [0, -1, 2**62, *range(1000)]


def launch(case: str, size: int, arguments: str, script: str = __file__) -> int:
    def start(rank: int, address: str) -> subprocess.Popen[str]:
        command = [sys.executable, script, "--rank", case, str(rank), str(size), address, arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    first = start(0, "")
    assert first.stdout is not None
    address = first.stdout.readline().strip()
    processes = [first, *(start(rank, address) for rank in range(1, size))]
    results, failed = [], 0
    for process in processes:
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        results.append(json.loads(lines[-1].removeprefix(MARK)) if lines else None)
        failed += process.returncode not in (0, -signal.SIGKILL)
    print(json.dumps(results))
    return failed


def run_rank(case: str, rank: int, size: int, address: str, arguments: str) -> None:
    torch.set_num_threads(1)
    store = None
    if rank == 0:
        store, address = open_store()
        print(address, flush=True)
    result = CASES[case](rank, size, address, store, **json.loads(arguments))
    print(MARK + json.dumps(result), flush=True)


def report(result: Any) -> None:
    """Print a result early, for a rank that is about to be killed."""
    print(MARK + json.dumps(result), flush=True)


def messages(rank: int, size: int, address: str, store: Any) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    os.environ["LOCAL_RANK"] = "before"
    received = []
    for _ in range(2):  # a process may join again after it has left
        group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=60)
        during = {name: os.environ.get(name) for name in names}
        for length in (0, 1, 126, 127, 128, len(LONG)):
            if group.is_first:
                group.send(LONG[:length])
            else:
                received.append(group.receive())
        tensor = torch.arange(12.0).reshape(3, 4) * (1 if group.is_first else -1)
        group.share(tensor)
        with torch.inference_mode():
            inference = torch.full((5,), float(rank), dtype=torch.bfloat16)
            group.share(inference)
        torch.distributed.barrier()
        device = str(group.device)
        group.close()
        group.close()
        if rank == 0:
            store, address = open_store()
            with open(os.environ["SECOND_ADDRESS"] + ".part", "w", encoding="ascii") as file:
                file.write(address)
            os.replace(os.environ["SECOND_ADDRESS"] + ".part", os.environ["SECOND_ADDRESS"])
        else:
            address = _wait_for(os.environ["SECOND_ADDRESS"])
    return {
        "received": received,
        "shared": tensor.tolist(),
        "inference": inference.tolist(),
        "during": during,
        "after": {name: os.environ.get(name) for name in names},
        "device": device,
    }


def _wait_for(path: str) -> str:
    while not os.path.exists(path):
        time.sleep(0.02)
    with open(path, encoding="ascii") as file:
        return file.read()


def first_is_killed(rank: int, size: int, address: str, store: Any) -> dict[str, Any]:
    group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=600)
    if group.is_first:
        group.send([int(time.time() * 1e3) + 1000])
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    killed_at = group.receive()[0] / 1e3
    with expect_loss() as outcome:
        group.receive()
    group.close()
    return {"after_s": time.time() - killed_at, **outcome}


def follower_is_killed(rank: int, size: int, address: str, store: Any, victim: int, by: str) -> Any:
    group = RankGroup.join(address, rank, size, "cpu", store=store, timeout_s=600)
    if rank == victim:
        group.receive()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 0:
        with expect_loss() as outcome:
            tensor = torch.zeros(4)
            while True:
                group.receive()
                if by == "share":
                    group.share(tensor)
        group.close()
        return outcome
    group.send([0])
    begin = time.time()
    with expect_loss() as outcome:
        while time.time() < begin + 60:
            group.send([0])
            if by == "share":
                group.share(torch.zeros(4))
            time.sleep(0.05)
    group.close()
    return {"after_s": time.time() - begin, **outcome}


@contextlib.contextmanager
def expect_loss() -> Any:
    outcome: dict[str, Any] = {"error": None}
    try:
        yield outcome
    except RankLostError as error:
        outcome["error"] = str(error)


CASES: dict[str, Any] = {
    "messages": messages,
    "first_is_killed": first_is_killed,
    "follower_is_killed": follower_is_killed,
}


def main(arguments: list[str], script: str = __file__) -> int:
    """Be a rank, or launch them."""
    if arguments[0] == "--rank":
        case, rank, size, address, values = arguments[1:]
        run_rank(case, int(rank), int(size), address, values)
        return 0
    case, size, values = (*arguments, "{}")[:3]
    return launch(case, int(size), values, script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
