"""Fixtures of every test: fresh seeds, and an empty compiler cache; the `slow` marker."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="slow tests, too, all cases of them")


def pytest_configure(config: pytest.Config) -> None:
    meaning = "not without --whole; with one_in=n, every n-th of its cases always, from case first"
    config.addinivalue_line("markers", f"slow(one_in, first): {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("whole"):
        return
    cases: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left_out if _is_slow(item, cases[test]) else kept).append(item)
        cases[test] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Exempt all imported and collected objects from garbage collection.

    Scanning them takes up to a second each time, and Hugging Face's Trainer collects in every fit.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise C++ bindings report leaks of the objects they hold


def _is_slow(item: pytest.Item, case: int) -> bool:
    marker = item.get_closest_marker("slow")
    if marker is None:
        return False
    one_in = marker.kwargs.get("one_in")
    return one_in is None or (case - marker.kwargs.get("first", 0)) % one_in > 0


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether `--whole` was given, for tests that select among many cases themselves."""
    found: bool = request.config.getoption("whole")
    return found


# Torch is imported in fixtures, not at the top: pytest's first process, which only starts others
# that run the tests, would wait for it.
@pytest.fixture(scope="session")
def _generator() -> Any:
    import torch

    # Without an accelerator, `torch.manual_seed` keeps the seed for one, with a stack trace.
    return torch if torch.accelerator.is_available() else torch.default_generator


@pytest.fixture(autouse=True)
def _seed(_generator: Any) -> None:
    _generator.manual_seed(0)


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Run without oneDNN, whose LSTM takes bfloat16 on some processors only."""
    import torch

    set_flags = torch.backends.mkldnn.set_flags
    before = set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    yield
    set_flags(*before)  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Reset the compiler: in one process it compiles code that modules share only eight times."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
