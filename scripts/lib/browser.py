"""Chromium as scripts and tests start it: the system's, without a GPU, and quiet on the network."""

import shutil
from typing import Any

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def launch(engine: Any) -> Any:
    return engine.chromium.launch(executable_path=chromium(), args=list(QUIET))
