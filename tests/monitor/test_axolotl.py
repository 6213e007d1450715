"""Axolotl's plugin, called as Axolotl's plugin manager calls one."""

import copy
import importlib
import pickle

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from adiv_monitor.axolotl import Plugin
from adiv_monitor.huggingface import DivergenceTrainerCallback

# What the manager calls with keywords, beside the callbacks before the trainer, and what it
# takes as nothing: documented in axolotl.integrations.base.BasePlugin.
EVENTS = {
    "register": ("cfg",),
    "get_input_args": (),
    "load_datasets": ("cfg", "preprocess"),
    "pre_model_load": ("cfg",),
    "post_model_build": ("cfg", "model"),
    "pre_lora_load": ("cfg", "model"),
    "post_lora_load": ("cfg", "model"),
    "post_model_load": ("cfg", "model"),
    "get_trainer_cls": ("cfg",),
    "post_trainer_create": ("cfg", "trainer"),
    "create_optimizer": ("cfg", "trainer"),
    "create_lr_scheduler": ("cfg", "trainer", "optimizer", "num_training_steps"),
    "add_callbacks_post_trainer": ("cfg", "trainer"),
    "post_train": ("cfg", "model"),
    "post_train_unload": ("cfg",),
}


def loaded(name: str) -> object:
    """Load a plugin by the name in Axolotl's YAML file, as its `load_plugin` does."""
    module, _, of_module = name.rpartition(".")
    return getattr(importlib.import_module(module), of_module)()


def test_the_trainer_gets_the_callback() -> None:
    plugin = loaded("adiv_monitor.axolotl.Plugin")
    assert isinstance(plugin, Plugin)
    (callback,) = plugin.add_callbacks_pre_trainer(cfg={}, model=object())
    assert isinstance(callback, DivergenceTrainerCallback)


@pytest.mark.parametrize("event", EVENTS)
def test_every_other_event_does_nothing(event: str) -> None:
    names = EVENTS[event]
    assert getattr(Plugin(), event)(*names) is None
    assert getattr(Plugin(), event)(**dict.fromkeys(names)) is None


def test_it_can_be_copied() -> None:
    assert isinstance(copy.deepcopy(Plugin()), Plugin)
    assert isinstance(pickle.loads(pickle.dumps(Plugin())), Plugin)
