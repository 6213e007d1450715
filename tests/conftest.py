"""What every test gets: fresh seeds, and a compiler that has seen nothing yet."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Code that modules share may be compiled eight times in a process, in all tests together."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
