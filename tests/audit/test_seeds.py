"""Random numbers of the audit's copies: the same every time, and nothing of the program's own."""

import random
from typing import Any

import numpy as np
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
