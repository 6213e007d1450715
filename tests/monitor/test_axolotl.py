"""Axolotl's plugin, loaded and called as Axolotl's plugin manager does; by the real one if there.

LLaMA-Factory and ms-swift take the callback as the page on fine-tuning says, through stand-ins.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import blocks
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from adiv_monitor.huggingface import DivergenceTrainerCallback

NAME = "adiv_monitor.axolotl.Plugin"
PAGE = blocks.ROOT / "docs" / "fine-tuning.md"


class BasePlugin:
    """Two of the methods that Axolotl's has; what they return is part of its interface."""

    def get_adapter_capabilities(self) -> list[Any]:
        return []

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []


class Manager:
    """What Axolotl's does with a plugin that is named in the YAML file."""

    def register(self, name: str) -> None:
        module, _, of_module = name.rpartition(".")
        self.plugin = getattr(importlib.import_module(module), of_module)()

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return [*self.plugin.add_callbacks_pre_trainer(cfg, model)]

    def supports_adapter(self, adapter: str) -> bool:
        return any(each.name == adapter for each in self.plugin.get_adapter_capabilities())


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Make a module importable that is not there."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(content)


@pytest.mark.parametrize("which", ["a stand-in", "Axolotl"])
def test_the_trainer_gets_the_callback(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.delitem(sys.modules, "adiv_monitor.axolotl", raising=False)
    if which == "Axolotl":
        manager: Any = pytest.importorskip("axolotl.integrations.base").PluginManager()
    else:
        stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=BasePlugin)
        manager = Manager()
    manager.register(NAME)
    (callback,) = manager.add_callbacks_pre_trainer({}, object())
    assert isinstance(callback, DivergenceTrainerCallback)
    assert not manager.supports_adapter("lora"), "other methods are those of Axolotl's own class"


def test_without_axolotl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "adiv_monitor.axolotl", raising=False)
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", None)
    with pytest.raises(ImportError, match="needs Axolotl, which loads it"):
        importlib.import_module("adiv_monitor.axolotl")


def test_recipes_of_llama_factory_and_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_exp(args, callbacks)`; `callbacks_map[name](args, trainer)` for each name asked for."""
    given: list[Any] = []
    run = {"run_exp": lambda args=None, callbacks=None: given.append((args, callbacks))}
    stand_in(monkeypatch, "llamafactory.train.tuner", **run)
    of_swift: dict[str, Any] = {}
    stand_in(monkeypatch, "swift", callbacks_map=of_swift)
    _, factory, swift, _ = blocks.python_blocks(PAGE)
    for recipe in (factory, swift):
        exec(compile(recipe, PAGE.name, "exec"), {"args": {"stage": "sft"}})
    ((args, (callback,)),) = given
    assert args == {"stage": "sft"} and isinstance(callback, DivergenceTrainerCallback)
    assert isinstance(of_swift["adiv"](object(), object()), DivergenceTrainerCallback)
