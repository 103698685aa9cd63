"""The page: a template, its scripts and styles, and the data, in one file."""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import rollout_pool
from rollout_pool.errors import ConfigError, InputFileError, OutputFileError
from rollout_pool.report.collected import FINISH_REASONS, Collected
from rollout_pool.report.pieces import Pieces
from rollout_pool.report.timeline import Timeline, timeline_of
from rollout_pool.trace import read_trace, trace_path

SCRIPTS = ("data.js", "theme.js", "timeline.js", "distributions.js", "tokens.js", "samples.js", "page.js")
CHARTS = "vendor/echarts.min.js"


def write_report(
    output: Path,
    page: Path,
    *,
    trace: Path | None = None,
    tokenizer: str | None = None,
    max_samples: int = 20_000,
) -> list[str]:
    """Draw the run that wrote ``output``, finished or not, as the HTML file ``page``.

    Args:
        trace: of that run; by default the file next to the output, if there is one.
        tokenizer: folder of the one whose tokens the samples are; by default the one that the trace names.
        max_samples: so many texts at most can be looked at in the page; what it counts is all of them.

    Returns what is missing from the page, and why. Raises :class:`InputFileError` or
    :class:`OutputFileError` for a file that cannot be read or written.
    """
    collected = Collected(_lines_of(output), max_samples)
    where = trace or trace_path(output)
    if trace is not None and not trace.is_file():
        raise InputFileError(f"there is no file {trace}")
    timeline = timeline_of(read_trace(where) if where.is_file() else ())
    notes = []
    if timeline.num_prompts is None:
        notes.append(f"no timeline: there is no trace {where}")
    pieces, ids = _pieces(tokenizer or timeline.tokenizer, collected, notes)
    if collected.is_thinned:
        notes.append(f"texts of {len(collected.groups)} of {collected.num_groups} groups (--max-samples)")
    blobs = {
        "overview": _json(_overview(output, collected, timeline, notes)),
        "texts": _json({"groups": list(collected.groups.values()), **pieces}),
        "ids": ids.tobytes(),
        "logprobs": collected.tokens()[1].tobytes(),
    }
    try:
        page.write_text(_render(output.name, blobs), encoding="utf-8")
    except OSError as error:
        raise OutputFileError(f"cannot write {page}: {error.strerror}") from None
    return notes


def _lines_of(output: Path) -> Path:
    """The file with the groups: of a Parquet output that is not finished, the lines that it is made of."""
    unfinished = output.with_name(output.name + ".part.jsonl")
    return unfinished if not output.is_file() and unfinished.is_file() else output


def _pieces(tokenizer: str | None, collected: Collected, notes: list[str]) -> tuple[dict[str, Any], Any]:
    """Texts of the tokens that occur, and every token as its place among them."""
    used, places = np.unique(collected.tokens()[0], return_inverse=True)
    ids = places.astype(np.uint16 if used.size <= 65_536 else np.uint32)
    vocabulary: dict[str, Any] = {"ids": used.tolist(), "pieces": None, "special": []}
    try:
        if tokenizer is None:
            raise ValueError("nothing names the tokenizer")
        pieces = Pieces(tokenizer)
    except ValueError as error:
        notes.append(f"texts are not split into tokens: {error} (--tokenizer DIR)")
    else:
        vocabulary["pieces"] = pieces.of(used.tolist())
        vocabulary["special"] = pieces.special(used.tolist())
    return vocabulary, ids


def _overview(output: Path, collected: Collected, timeline: Timeline, notes: list[str]) -> dict[str, Any]:
    num_prompts = timeline.num_prompts
    needed = sum(collected.prompt_tokens_needed.get(index, 0) for index in timeline.prefill_tokens)
    computed = sum(timeline.prefill_tokens.values())
    steps, decoded = timeline.totals.get("decode_steps", 0), timeline.totals.get("rows_decoded", 0)
    return {
        "name": output.name,
        "version": rollout_pool.__version__,
        "notes": notes,
        "reasons": FINISH_REASONS,
        "num_groups": collected.num_groups,
        "num_prompts": num_prompts,
        "num_failed": collected.num_failed,
        "num_samples": collected.num_samples,
        "num_tokens": collected.num_tokens,
        "is_over": timeline.is_over or (num_prompts is not None and collected.num_groups >= num_prompts),
        "prefill": {"computed": computed, "saved": max(0, needed - computed)},
        "rows_per_step": decoded / steps if steps else None,
        "facts": timeline.facts,
        "load_s": round(timeline.load_s, 1),
        "seconds": round(timeline.seconds, 1),
        "totals": timeline.totals,
        "actors": timeline.actors,
        "stays": timeline.stays,
        "points": timeline.points,
        "incidents": timeline.incidents,
        "columns": collected.columns,
    }


def _render(title: str, blobs: dict[str, bytes]) -> str:
    try:
        from jinja2 import Environment
    except ImportError:
        remedy = "install it with: pip install 'rollout-pool[report]'"
        raise ConfigError(f"a report needs Jinja2; {remedy}") from None
    template = Environment(autoescape=True).from_string(_asset("page.html"))
    return template.render(
        title=title,
        styles=_asset("page.css"),
        charts=_asset(CHARTS),
        scripts="\n".join(map(_asset, SCRIPTS)),
        blobs={name: _packed(blob) for name, blob in blobs.items()},
    )


def _asset(name: str) -> str:
    return files("rollout_pool.report").joinpath("page", name).read_text(encoding="utf-8")


def _packed(blob: bytes) -> str:
    """Nothing in it can be taken for HTML: samples are whatever a model wrote."""
    return base64.b64encode(gzip.compress(blob, 6, mtime=0)).decode()


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
