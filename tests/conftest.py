"""What every test gets: fresh seeds, and a compiler that has seen nothing yet."""

import sys
from collections import Counter

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of tests that are thinned")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thinned(every): one case in so many, but with --whole all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("whole"):
        return
    cases: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        marker = item.get_closest_marker("thinned")
        test = item.nodeid.partition("[")[0]
        is_left_out = marker is not None and cases[test] % marker.args[0] > 0
        cases[test] += 1
        (left_out if is_left_out else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Code that modules share may be compiled eight times in a process, in all tests together."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
