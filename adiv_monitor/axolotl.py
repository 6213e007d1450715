"""The monitor as a plugin of Axolotl: `plugins: [adiv_monitor.axolotl.Plugin]`."""

from typing import Any

from adiv_monitor.huggingface import DivergenceTrainerCallback

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError(
        "adiv_monitor.axolotl needs Axolotl, which loads it: "
        "`plugins: [adiv_monitor.axolotl.Plugin]` in its YAML file"
    ) from error


class Plugin(BasePlugin):  # type: ignore[misc]
    """Gives the Trainer that Axolotl makes a `DivergenceTrainerCallback`.

    It measures at the Trainer's `logging_steps`, within `max_overhead`.

    Raises:
        ImportError: Axolotl is not installed.
    """

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[DivergenceTrainerCallback]:
        """Return the callback."""
        return [DivergenceTrainerCallback()]
