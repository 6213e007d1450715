"""Models of many libraries with their training loops, small and offline: what must be measured."""

from zoo.libraries import PEFT, TIMM, TRANSFORMERS
from zoo.plain import TORCH
from zoo.training import Specimen, Trained, Training, seed
from zoo.vision import TORCHVISION

ZOO: dict[str, Specimen] = {**TORCHVISION, **TRANSFORMERS, **PEFT, **TIMM, **TORCH}

__all__ = ["ZOO", "Specimen", "Trained", "Training", "seed"]
