"""Pictures of HTML pages, taken in headless Chromium.

playwright is in the extra `dev`. Chromium has to be on PATH.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright


def photograph(
    page_text: str, element: str, picture: Path, *, drawn: str, width: int, height: int, without: str = ""
) -> None:
    """Write a PNG of one element of an HTML page.

    Args:
        page_text: the HTML.
        element: selector of the element.
        drawn: selector that exists when the page is complete.
        without: selector of the parts that the picture leaves out.
    """
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(page_text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=1.5)
        page.goto(file.as_uri())
        page.wait_for_selector(drawn)
        if without:
            page.add_style_tag(content=f"{without} {{ display: none; }}")
        page.locator(element).screenshot(path=picture)
        browser.close()
