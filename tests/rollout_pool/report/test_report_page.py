"""The page in a real browser: ten thousand samples, clicked through, on a desk and on a phone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_pool.report.page import write_report

NUM_GROUPS, N = 1_251, 8
ZOOM = """(() => {
    const chart = echarts.getInstanceByDom(document.getElementById("timeline-chart"));
    const { start, end } = chart.getOption().dataZoom[0];
    return [start, end];
})()"""
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def run(fake_run: Callable[..., Any]) -> Any:
    return fake_run(NUM_GROUPS, N)


@pytest.fixture(scope="module")
def report(run: Any) -> Path:
    path = run.output.with_suffix(".html")
    assert write_report(run.output, path) == []
    return path


def zoom(page: Any) -> list[float]:
    """From where to where the timeline shows, in percent of the run."""
    return page.evaluate(ZOOM)


def click_in_chart(page: Any, chart: str, finder: dict[str, int], point: list[Any]) -> None:
    """Click a chart where it draws this point."""
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    instance = f"echarts.getInstanceByDom(document.getElementById('{chart}'))"
    x, y = page.evaluate(f"([finder, point]) => {instance}.convertToPixel(finder, point)", [finder, point])
    box = page.locator(f"#{chart}").bounding_box()
    page.mouse.click(box["x"] + x, box["y"] + y)


def test_ten_thousand_samples_load_and_are_counted(run: Any, report: Path, visit: Callable[..., Any]) -> None:
    start = time.perf_counter()
    page = visit(report)
    num_tokens = sum(len(sample["token_ids"]) for sample in run.samples)
    print(
        f"\n{len(run.samples):,} samples of {num_tokens:,} tokens, {report.stat().st_size / 1e6:.1f} MB: "
        f"ready in {time.perf_counter() - start:.2f} s"
    )
    tiles = dict(
        page.eval_on_selector_all(
            ".tile", "all => all.map((t) => [t.children[1].textContent, t.children[0].textContent])"
        )
    )
    assert tiles["groups"] == f"{NUM_GROUPS:,}"
    assert tiles["samples"] == f"{len(run.samples):,}" == "10,000"
    assert tiles["new tokens"] == f"{num_tokens:,}"
    assert tiles["groups failed"] == "1"
    mean = sum(sample["reward"] for sample in run.samples) / len(run.samples)
    assert float(tiles["mean reward"]) == pytest.approx(mean, abs=6e-4)
    saved = 1 - 10 * NUM_GROUPS / (10 * len(run.samples))  # prompts of 10 tokens, each computed once
    assert next(value for label, value in tiles.items() if "saved" in label) == f"{100 * saved:.0f} %"
    assert page.locator("#state").text_content() == "finished"
    assert page.locator(".row").count() < 60, "the list is not virtual"


def test_the_timeline_zooms_and_opens_what_is_clicked(
    run: Any, report: Path, visit: Callable[..., Any]
) -> None:
    page = visit(report)
    assert zoom(page) == [0, 100]
    page.locator("#timeline-chart").evaluate("chart => chart.scrollIntoView({block: 'end'})")
    box = page.locator("#timeline-chart").bounding_box()
    y = box["y"] + box["height"] - 18
    page.mouse.move(box["x"] + box["width"] - 18, y)  # the right handle of the bar
    page.mouse.down()
    page.mouse.move(box["x"] + 62 + (box["width"] - 80) * 0.02, y, steps=8)
    page.mouse.up()
    page.wait_for_function(f"{ZOOM}[1] < 2.5")
    assert zoom(page)[0] == 0
    first = next(event for event in run.events if event.get("index") == 3)
    sample, slot, _, ready, stop = first["stays"][3]
    row = slot + (0 if first["actor"] == "actor-0" else 16.6) + 0.5
    click_in_chart(
        page, "timeline-chart", {"xAxisIndex": 0, "yAxisIndex": 0}, [(ready + stop) / 2 - 1_000, row]
    )
    assert page.locator("#group h2").text_content() == f"Prompt {first['index']}"
    assert page.locator(".sibling.chosen .line b").text_content() == f"{first['index']} · {sample}"
    page.click("#zoom-out")
    assert zoom(page) == [0, 100]

    page.locator("#incidents summary").click()
    texts = page.locator("#incidents li span").all_text_contents()
    assert "actor-1 lost, to be replaced" in texts
    assert "actor-1.1 takes the place of a lost actor" in texts
    assert "2 groups sent out again after the loss of an actor" in texts
    assert any(text.endswith("<b>& more</b>") for text in texts)
    page.locator("#incidents button").first.click()
    start, end = zoom(page)
    assert 40 < start < end < 60
    page.select_option("#actor", label="actor-1")
    for colour in ("finish", "reward", "logprob"):
        page.select_option("#colour", colour)


def test_samples_are_searched_filtered_and_ordered(run: Any, report: Path, visit: Callable[..., Any]) -> None:
    page = visit(report)

    def first_row() -> str:
        return page.locator(".row").first.locator(".line").text_content()

    page.fill("#search", "XYLO")
    page.wait_for_function("document.getElementById('count').textContent === '1 of 10,001'")
    assert "0 · 7" in first_row()
    page.fill("#search", "question 77")  # in prompts: 77 and 770 to 779
    page.wait_for_function("document.getElementById('count').textContent === '88 of 10,001'")
    page.fill("#search", "")
    page.wait_for_function("document.getElementById('count').textContent === '10,001 of 10,001'")

    cut = [sample for sample in run.samples if sample["finish_reason"] == "length"]
    click_in_chart(page, "reasons-chart", {"xAxisIndex": 0, "yAxisIndex": 0}, [1, "length"])
    assert page.locator("#count").text_content() == f"{len(cut):,} of 10,001"
    page.select_option("#order", "longest")
    assert f"{max(len(sample['token_ids']) for sample in cut)} tokens" in first_row()
    page.select_option("#order", "best")
    assert f"reward {max(sample['reward'] for sample in cut):g}" in first_row()
    page.locator("#list").evaluate("list => list.scrollTop = list.scrollHeight")
    page.wait_for_function(
        "document.querySelectorAll('.row').length && document.querySelector('.row').offsetTop > 1000"
    )
    page.select_option("#reason", "failed")
    assert "lost 3 times <b>& more</b>" in page.locator(".row").text_content()
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#group .fault").text_content().endswith("<b>& more</b>")


def test_siblings_stand_side_by_side_with_tinted_tokens(
    run: Any, report: Path, visit: Callable[..., Any]
) -> None:
    page = visit(report)
    page.locator(".row").nth(2).click()
    cards = page.locator(".sibling")
    assert cards.count() == N
    assert len({round(cards.nth(place).bounding_box()["y"]) for place in range(2)}) == 1
    for place, sample in enumerate(run.records[0]["samples"]):
        cards.nth(place).locator(".text").wait_for(state="attached")  # drawn when it comes into view
        text = cards.nth(place).locator(".token:not(.beside)").all_text_contents()
        assert "".join(text) == sample["text"]
        is_stopped = sample["finish_reason"] == "stop"
        assert cards.nth(place).locator(".token.beside").all_text_contents() == ["<eos>"] * is_stopped
    assert page.evaluate("window.pwned") is None
    assert page.locator("#group details pre").text_content() == '{"task": "</script>0"}'

    # Tints follow the log-probabilities, and the tip says the number.
    tokens = cards.nth(0).locator(".token")
    logprobs = run.records[0]["samples"][0]["logprobs"]
    strengths = [
        float(value)
        for value in tokens.evaluate_all("all => all.map((t) => t.style.getPropertyValue('--strength'))")
    ]
    assert len(strengths) == len(logprobs)
    by_logprob = sorted(range(len(logprobs)), key=lambda at: -logprobs[at])
    assert [strengths[at] for at in by_logprob] == sorted(strengths)
    tokens.nth(3).hover()
    shown = page.locator("#tip").text_content().split("  ")[-1].split(" nats")[0]
    assert float(shown) == pytest.approx(logprobs[3], abs=1e-3)
    cards.nth(1).locator(".token").first.hover()
    assert "not finite" in page.locator("#tip").text_content()


def test_light_and_dark_follow_the_system_and_the_button(report: Path, visit: Callable[..., Any]) -> None:
    def background(page: Any) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(", ")))

    page = visit(report, color_scheme="dark")
    assert background(page) < 150
    page.emulate_media(color_scheme="light")
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    assert background(page) > 600
    before = page.locator("#timeline-chart canvas").first.screenshot()
    page.click("#theme")
    assert background(page) < 150
    assert page.locator("#timeline-chart canvas").first.screenshot() != before


def test_a_phone_shows_all_of_it(report: Path, visit: Callable[..., Any]) -> None:
    page = visit(report, **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#group").is_hidden()
    page.locator(".row").nth(1).tap()
    page.locator("#group").wait_for(state="visible")
    box = page.locator("#group").bounding_box()
    assert (box["x"], box["width"]) == (0, 390)
    page.locator(".sibling.chosen .token").nth(2).tap()
    page.locator("#tip").wait_for(state="visible")
    page.locator("#group .close").tap()
    page.locator("#group").wait_for(state="hidden")
    for chart in page.locator(".chart canvas").all():
        assert chart.bounding_box()["width"] <= 390
