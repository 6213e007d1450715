"""The base class of the Lightning callbacks, from whichever Lightning packages are installed."""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_lightning import Callback as Callback
else:

    def _installed_callbacks() -> tuple[type, ...]:
        found = []
        for package in ("pytorch_lightning", "lightning.pytorch"):
            with suppress(ImportError):
                found.append(import_module(package).Callback)
        if not found:
            raise ImportError('its callbacks need Lightning: pip install "adiv-monitor[lightning]"')
        return tuple(found)

    Callback = type("Callback", _installed_callbacks(), {})
