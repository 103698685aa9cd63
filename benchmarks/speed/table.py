"""Results as Markdown: ratios first, then the rates behind them."""

from __future__ import annotations

from statistics import median
from typing import Any

from speed.machine import machine_line
from speed.peers import OUR_WAYS, OURS, PEERS
from speed.workloads import RECIPES

Results = dict[str, Any]


def tables(results: Results) -> str:
    """All tables of one file of results."""
    parts = [machine_line(results["machine"]), ratio_table(results), rate_table(results), pool_table(results)]
    return "\n\n".join(part for part in parts if part)


def ratio_table(results: Results) -> str:
    """Ours over each peer: the median of the rounds, the lowest and the highest."""
    heads = [f"{title} | rounds" for title in OUR_WAYS.values()]
    lines = [f"| workload | against | {' | '.join(heads)} | load |", "| --- |" + " --- |" * 6]
    for name, found in results["workloads"].items():
        peers = found["peers"]
        load = found.get("load", "")  # of a quarter of an hour: the peers' own threads are in it
        for peer, one in peers.items():
            if PEERS[peer].is_ours:
                continue
            cells = [RECIPES[name].title, PEERS[peer].title]
            if "rates" not in one:
                cells += [f"does not run: {_cell(one['unavailable'])}", "", "", "", ""]
            else:
                cells += [cell for ours in OUR_WAYS for cell in _ratio(peers.get(ours, {}), one)]
                cells.append(str(load))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The median of the rounds in which both took part, and their spread."""
    ratios = [a / b for a, b in zip(ours.get("speeds", []), theirs["speeds"], strict=False)]
    return [f"**{median(ratios):.2f}x**", spread(ratios, 2)] if ratios else ["", ""]


def rate_table(results: Results) -> str:
    """Tokens per second, best number of rows, time to the first group, cold start."""
    lines = [
        "| workload | who | rows | tokens/s | rounds | first group | cold start | tried, rows: tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results["workloads"].items():
        for peer, one in found["peers"].items():
            if "rates" not in one:
                continue
            tried = ", ".join(f"{rows}: {rate:.0f}" for rows, rate in one["tried"].items())
            cells = [
                RECIPES[name].title,
                PEERS[peer].title,
                str(one["rows"]),
                f"{median(one['rates']):.0f}",
                spread(one["rates"], 0),
                f"{one['first_group_s']:.1f} s",
                f"{one['cold_start_s']:.1f} s",
                tried,
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pool_table(results: Results) -> str:
    """What a pool costs, and what its second actor brings; empty when no pool took part."""
    lines = ["| workload | what | ratio | rounds |", "| --- | --- | --- | --- |"]
    for name, found in results["workloads"].items():
        for what, above, below in (
            ("pool of one actor / its engine alone", "pool", OURS),
            ("pool of two actors / the sum of two engines alone", "pool of two", "split engines"),
            ("pool of two actors / pool of one with all threads", "pool of two", "pool"),
            ("pool of two actors / engines with prompts split beforehand", "pool of two", "split engines "),
            ("pool of two actors / `generate` per core, split beforehand", "pool of two", "split generate"),
        ):
            keys = ("rates", "sums_of_rates") if below == "split engines" else ("speeds", "speeds")
            upper, lower = (
                found["peers"].get(peer.strip(), {}).get(key)
                for peer, key in zip((above, below), keys, strict=True)
            )
            if upper and lower:
                ratios = [a / b for a, b in zip(upper, lower, strict=False)]
                title = RECIPES[name].title
                lines.append(f"| {title} | {what} | **{median(ratios):.2f}** | {spread(ratios, 2)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def spread(values: list[float], digits: int) -> str:
    """Lowest, highest, and how many."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f} of {len(values)}"


def _cell(text: str) -> str:
    return text.replace("|", "/")
