"""A headless Chromium that opens pages from files and records their requests."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")


# On a busy machine a script may be answered by the page of before.
_THERE = "return location.protocol === 'file:' && document.readyState === 'complete'"


class Browser:
    """One page at a time.

    Attributes:
        driver: selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, file: Path, dark: bool = False, width: int = 1280) -> None:
        """Load a file with this preferred colour scheme."""
        from selenium.webdriver.support.ui import WebDriverWait

        command = self.driver.execute_cdp_cmd
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        command("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        command("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(file.as_uri())
        WebDriverWait(self.driver, 60).until(lambda driver: driver.execute_script(_THERE))

    def run(self, script: str, *arguments: object) -> Any:
        """Return the value of a script."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        """Return the first matching element."""
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click on the middle of the first matching element, wherever it is on the page."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def texts(self, selector: str) -> list[str]:
        """Return the texts of the visible elements."""
        script = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".filter(e => e.getClientRects().length).map(e => e.textContent.trim())"
        )
        return list(self.run(script, selector))

    def errors(self) -> list[Any]:
        """Return the console's complaints since the page was opened."""
        return list(self.driver.get_log("browser"))

    def requests(self) -> list[str]:
        """Return the addresses requested since the page was opened."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Yield a browser with a new, empty profile; skip the test if there is no browser."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="drives the browser")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        with suppress(OSError):  # it may hang up before it has answered
            driver.quit()
