"""abc-parametrizations: exponents of multipliers, initialisation and learning rates in the width.

A layer computes n^(−a) W x with W ~ N(0, n^(−2b)), and has the learning rate η n^(−c), which is
larger the smaller c is (Everett et al. 2024, arXiv 2407.05872).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Exponents = tuple[float, ...]
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Parametrization:
    """A choice of a and b for each of the three roles: embedding, hidden layer, readout.

    Attributes:
        name: name of the parametrization.
        a: exponents of the multipliers n^(−a).
        b: exponents of the standard deviations n^(−b) at initialisation.
    """

    name: str
    a: tuple[float, float, float]
    b: tuple[float, float, float]


SP = Parametrization("sp", (0, 0, 0), (0, 0.5, 0.5))
NTK = Parametrization("ntk", (0, 0.5, 0.5), (0, 0, 0))
MUP = Parametrization("mup", (-0.5, 0, 0.5), (0.5, 0.5, 0.5))
MFP = Parametrization("mfp", (0, 0.5, 1), (0, 0, 0))
PARAMETRIZATIONS: Mapping[str, Parametrization] = MappingProxyType(
    {p.name: p for p in (SP, NTK, MUP, MFP)}
)


def parametrization_named(given: str | Parametrization) -> Parametrization:
    """Return the parametrization of that name; a `Parametrization` is returned unchanged.

    Raises:
        ValueError: no parametrization has that name.
    """
    if isinstance(given, Parametrization):
        return given
    if not isinstance(given, str) or given.lower() not in PARAMETRIZATIONS:
        raise ValueError(
            f"parametrization={given!r}: expected one of {', '.join(map(repr, PARAMETRIZATIONS))}, "
            "or a Parametrization of yours"
        )
    return PARAMETRIZATIONS[given.lower()]


def unstable_at_initialisation(
    a: Sequence[float], b: Sequence[float], sources: Sequence[int], sinks: Sequence[int]
) -> str:
    """Return which layer's output grows or vanishes with width before training; "" if none does.

    a + b must be 0 in embeddings, whose input does not grow with width, ½ in hidden layers, and at
    least ½ in readouts.
    """
    for layer, total in enumerate(x + y for x, y in zip(a, b, strict=True)):
        expected = 0.0 if layer in sources else 0.5
        grown = total - expected
        if layer in sinks:
            grown = min(grown, 0.0)
        if abs(grown) > _TOLERANCE:
            least = "at least " if layer in sinks else ""
            return f"layer {layer}: a + b is {total:g}, expected {least}{expected:g}"
    return ""
