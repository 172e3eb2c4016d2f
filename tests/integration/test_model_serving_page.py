"""The example's page in a real browser: it draws hands, and shows the letters that come back.

By hand, with `make test-long ONLY=page`; needs Debian's package `chromium`. SCREENSHOT=FILE keeps a picture.
"""

import asyncio
import importlib
import os
import shutil
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "model_serving"
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_the_page_shows_the_letters_of_the_hands_that_it_drew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    stage_module = importlib.import_module("stage")
    playwright = importlib.import_module("playwright.async_api")
    chromium = shutil.which("chromium")
    assert chromium, "install it first: apt-get install chromium"

    async def main() -> None:
        async with stage_module.running_stage(tmp_path) as stage, playwright.async_playwright() as browsers:
            browser = await browsers.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS)
            page = await browser.new_page(viewport={"width": 1000, "height": 720})
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            await page.goto(stage.gateway_url)
            await page.wait_for_function("document.getElementById('letters').childElementCount >= 60", timeout=90_000)
            right = await page.locator("#letters span:not(.wrong)").count()
            shown = await page.locator("#letters span").count()
            assert right / shown > 0.9
            assert "ms" in await page.locator("#latency").inner_text()
            await page.get_by_role("button", name="W", exact=True).click()
            await page.wait_for_function("document.getElementById('letters').textContent.endsWith('WWWWW')")
            if "SCREENSHOT" in os.environ:
                await page.screenshot(path=os.environ["SCREENSHOT"])
            await browser.close()
            assert not errors, errors

    asyncio.run(main())
