"""Take the pictures of a report that the documentation shows: at a desk, light and dark, and on a phone.

    make demo
    python benchmarks/report_pictures.py

Needs Chromium, and what tests need.
"""

from __future__ import annotations

import argparse
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 720}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True}


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of a report for the documentation.")
    parser.add_argument("--report", type=Path, default=ROOT / "demo_output" / "samples.html", metavar="FILE")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--hide-scrollbars"]
        )
        page = opened(chromium, args.report, DESK, "light")
        page.set_viewport_size({"width": 1280, "height": 960})
        page.wait_for_timeout(500)
        save(page.screenshot(), args.output / "report_timeline.png")
        page = opened(chromium, args.report, DESK, "dark")
        page.select_option("#order", "unlikely")
        page.locator(".row").nth(4).click()
        page.locator("#samples").evaluate("section => section.scrollIntoView()")
        page.locator(".sibling.chosen .token").first.wait_for()
        save(page.screenshot(), args.output / "report_samples_dark.png")
        phone = opened(chromium, args.report, {**PHONE, "device_scale_factor": 2}, "light")
        phone.locator("#timeline").evaluate("section => section.scrollIntoView()")
        pictures = [phone.screenshot()]
        phone.locator("#distributions").evaluate("section => section.scrollIntoView()")
        pictures.append(phone.screenshot())
        phone.locator(".row").nth(1).tap()
        phone.locator(".sibling.chosen .token").first.wait_for()
        pictures.append(phone.screenshot())
        save(side_by_side(pictures), args.output / "report_phone.png")
        chromium.close()


def opened(chromium: Any, report: Path, options: dict[str, Any], scheme: str) -> Any:
    """A page that is ready."""
    page = chromium.new_context(**options, color_scheme=scheme).new_page()
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("html[data-ready=true]")
    page.wait_for_timeout(500)  # for the last frame of the charts
    return page


def side_by_side(pictures: list[bytes], gap: int = 24) -> bytes:
    images = [Image.open(BytesIO(picture)).convert("RGB") for picture in pictures]
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    whole = Image.new("RGB", (width, images[0].height), "#c9ced8")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width + gap
    whole = whole.resize((whole.width * 2 // 3, whole.height * 2 // 3), Image.Resampling.LANCZOS)
    data = BytesIO()
    whole.save(data, "PNG")
    return data.getvalue()


def save(picture: bytes, path: Path) -> None:
    """With a palette: a quarter of the size, and no difference to see."""
    image = Image.open(BytesIO(picture)).convert("RGB").quantize(192, dither=Image.Dither.NONE)
    image.save(path, "PNG", optimize=True)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
