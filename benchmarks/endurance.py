"""Whether a pool stays as small as it was: many calls in a row on two rollout actors of one model.

    python benchmarks/endurance.py [--model DIR] [--calls 1000] [--every 20] [--json FILE] [--plot FILE.png]

After every so many calls: resident memory, open files and threads of each process (driver, pool, rollout
actors), and the bytes in Ray's object store. Prints the median of the first and the last fifth of the
readings after a tenth of the calls, in which allocators and caches fill. Calls alternate between ``rollout``
and ``stream``; now and then a prompt is bad, or a stream is cut early.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from rollout_pool import EngineConfig, PoolConfig, RolloutPool, RolloutRequest, SamplingParams

MIB = 2**20
QUANTITIES = {"resident": "resident memory, MiB", "files": "open files", "threads": "threads"}


@dataclass
class Reading:
    """One process after so many calls."""

    process: str
    calls: int
    resident: float
    """MiB."""
    files: int
    threads: int

    @classmethod
    def of(cls, name: str, pid: int, calls: int) -> Reading:
        process = psutil.Process(pid)
        with process.oneshot():
            resident = process.memory_info().rss / MIB
            return cls(name, calls, resident, process.num_fds(), process.num_threads())


def call(pool: Any, number: int) -> None:
    """One call of six prompts; what kind depends on its number."""
    sampling = SamplingParams(n=4, max_new_tokens=16)
    prompts: list[Any] = [[3 + (number * 7 + index) % 90, 4 + index, 5] for index in range(6)]
    if number % 10 == 3:
        prompts[2] = [10**6]  # outside the vocabulary: its group fails
    if number % 10 == 5:
        prompts[4] = RolloutRequest(
            prompts[4], SamplingParams(n=2, max_new_tokens=24), metadata={"n": number}
        )
    if number % 2:
        take = 3 if number % 10 == 7 else None
        groups = [ray.get(ref) for ref in pool.stream.remote(prompts, sampling, take=take)]
        assert len(groups) == (take or len(prompts))
    else:
        assert len(ray.get(pool.rollout.remote(prompts, sampling))) == len(prompts)


def store_mib() -> float:
    """What all nodes together have in their object stores."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return float(get_memory_info_reply(state).store_stats.object_store_bytes_used) / MIB


def measure(pool: Any, calls: int, every: int) -> tuple[list[Reading], list[tuple[int, float]]]:
    """Readings of all processes, and of the object store."""
    pids = {"driver": psutil.Process().pid}
    pids["pool"] = ray.get(pool.__ray_call__.remote(lambda _: psutil.Process().pid))
    pids |= {info.name: info.pid for info in ray.get(pool.ready.remote())}
    readings: list[Reading] = []
    store: list[tuple[int, float]] = []
    for number in range(1, calls + 1):
        call(pool, number)
        if number % every == 0:
            readings += [Reading.of(name, pid, number) for name, pid in pids.items()]
            store.append((number, store_mib()))
    return readings, store


def fifths(values: list[float]) -> tuple[float, float]:
    """Medians of the first and the last fifth."""
    size = max(1, len(values) // 5)
    return statistics.median(values[:size]), statistics.median(values[-size:])


def report(readings: list[Reading], store: list[tuple[int, float]], calls: int) -> list[dict[str, Any]]:
    """First against last, of every quantity of every process."""
    lines = []
    for name in dict.fromkeys(one.process for one in readings):
        settled = [one for one in readings if one.process == name and one.calls > calls / 10]
        for quantity in QUANTITIES:
            first, last = fifths([float(getattr(one, quantity)) for one in settled])
            lines.append({"process": name, "quantity": quantity, "first": first, "last": last})
    first, last = fifths([size for number, size in store if number > calls / 10])
    return [*lines, {"process": "all nodes", "quantity": "object store, MiB", "first": first, "last": last}]


def plot(readings: list[Reading], store: list[tuple[int, float]], path: Path) -> None:
    """Four panels over the number of calls."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    for panel, (quantity, title) in zip(panels, QUANTITIES.items(), strict=False):
        for name in dict.fromkeys(one.process for one in readings):
            line = [(one.calls, getattr(one, quantity)) for one in readings if one.process == name]
            panel.plot(*zip(*line, strict=True), label=name, linewidth=1.5)
        panel.set_title(title, fontsize=10)
        panel.set_ylim(bottom=0)
    last = figure.axes[3]
    last.plot(*zip(*store, strict=True), color="tab:gray", linewidth=1.5)
    last.set_title("object store, MiB", fontsize=10)
    last.set_ylim(bottom=0, top=max(1.0, *(1.2 * size for _, size in store)))
    for panel in figure.axes:
        panel.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("calls", fontsize=10)
    figure.savefig(path, dpi=110)


def tiny_model(folder: str) -> str:
    """A random Llama without a tokenizer, in ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids)).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a folder; by default a small random model")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    model = options.model or tiny_model(folder.name)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    engine = EngineConfig(num_slots=8, max_length=64)
    pool = RolloutPool.remote(PoolConfig(model=model, num_actors=2, cpus_per_actor=1, engine=engine))
    ray.get(pool.ready.remote())
    begin = time.monotonic()
    readings, store = measure(pool, options.calls, options.every)
    seconds = time.monotonic() - begin
    stats = ray.get(pool.stats.remote())
    ray.shutdown()
    lines = report(readings, store, options.calls)
    print(
        f"{options.calls} calls in {seconds:.0f} s; {stats.submitted} groups in, {stats.in_flight} in flight"
    )
    print(f"{'process':12}{'quantity':20}{'first':>10}{'last':>10}")
    for line in lines:
        print(f"{line['process']:12}{line['quantity']:20}{line['first']:10.1f}{line['last']:10.1f}")
    if options.json:
        record = {"calls": options.calls, "report": lines, "readings": [asdict(one) for one in readings]}
        options.json.write_text(json.dumps(record), encoding="utf-8")
    if options.plot:
        plot(readings, store, options.plot)


if __name__ == "__main__":
    main()
