"""Random numbers of the audit's copies: the same every time, and nothing of the program's own."""

import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch

from adiv_monitor.audit.training.setup import seeded


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def drawn() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), float(np.random.rand())


def test_numbers_are_those_of_the_seed_and_the_programs_own_go_on() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = drawn()
    torch.manual_seed(1)
    own = states()
    with seeded(5):
        assert drawn() == expected
    assert states() == own


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch seeds the accelerator then")
def test_no_seed_is_kept_for_an_accelerator_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch would keep it with a stack trace, which takes longer than a small training step."""
    taken: list[object] = []
    monkeypatch.setattr(traceback, "format_stack", lambda: taken.append(None) or [])
    with seeded(3):
        torch.rand(1)
    assert not taken
