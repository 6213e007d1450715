"""Parameters of tests over the zoo: warnings that are to be expected, packages that are needed."""

from importlib.util import find_spec

import pytest

from zoo import ZOO
from zoo.libraries import PEFT, TIMM


def filtered(name: str) -> object:
    """Return a model's name as a parameter; it is skipped without the package that it is from."""
    marks = [pytest.mark.filterwarnings(f"ignore:{text}") for text in ZOO[name].warnings]
    for package, models in (("timm", TIMM), ("peft", PEFT)):
        if name in models and find_spec(package) is None:
            marks.append(pytest.mark.skip(reason=f"needs {package}"))
    return pytest.param(name, marks=marks)
