"""Compiled models run eagerly while anything is armed: hooks of inner modules fire only then."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_holders = 0
_stance = ExitStack()


@contextmanager
def forced_eager() -> Iterator[None]:
    """Hold compiled code back; what is already compiled stays so and is used again afterwards.

    Monitors of several optimizers overlap without being nested, so the first one that enters sets
    the stance and the last one that leaves puts it back.
    """
    global _holders
    _holders += 1
    if _holders == 1:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        _holders -= 1
        if _holders == 0:
            _stance.close()
