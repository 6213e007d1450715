"""The monitor as a plugin of Axolotl: `plugins: [adiv_monitor.axolotl.Plugin]`."""

from typing import Any

from adiv_monitor.huggingface import DivergenceTrainerCallback


class Plugin:
    """Gives the Trainer that Axolotl makes a `DivergenceTrainerCallback`.

    It measures at the Trainer's `logging_steps`, within `max_overhead`. Axolotl's base class is not
    needed: every other event that a plugin may be told does nothing.
    """

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[DivergenceTrainerCallback]:
        """Return the callback."""
        return [DivergenceTrainerCallback()]

    def __getattr__(self, event: str) -> Any:
        return object.__getattribute__(self, event) if event[0] == "_" else lambda *_, **__: None
