"""The solver's network of a model's layers: connections, shared weights, excluded layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.max_lr.exponents import (
    Exponents,
    Parametrization,
    parametrization_named,
    unstable_at_initialisation,
)
from adiv_monitor.max_lr.multiplier import multiplier_of
from adiv_monitor.max_lr.optimizers import UpdateRule
from adiv_monitor.max_lr.solver import MaxLRSolution, solve_max_lr
from adiv_monitor.report import AlignmentReading

Ratios = tuple[float | None, float | None, float | None]  # alpha, omega, u


@dataclass(frozen=True, eq=False)
class ModelNetwork:
    """The layers of a model, in the order in which they run.

    Attributes:
        layers: layers that feed another layer or are fed by one.
        a: exponents of their multipliers.
        b: exponents of their initialisation.
        rule: the optimizer's rule.
        kinds: 0 for an embedding, 1 for a hidden layer, 2 for a readout.
        tied: indices of layers whose weights share a parameter (tied, or packed projections).
    """

    layers: tuple[AlignedLayer, ...]
    a: Exponents
    b: Exponents
    rule: UpdateRule
    kinds: tuple[int, ...]
    tied: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[AlignedLayer],
        parametrization: str | Parametrization,
        rule: UpdateRule,
        *,
        is_applied: bool = True,
    ) -> "ModelNetwork":
        """Return the network of these layers in a parametrization.

        A parametrization that is applied by its name has multipliers. One that is given as a
        `Parametrization` may be part of the model's own code, where they are not seen. "sp" needs
        none: that of a weight that is used twice would only make up for its initialisation.

        A weight that is used twice is initialised as in its first use. If another use requires
        another b, its multiplier compensates: (a + t, b − t) is the same function.

        Raises:
            ValueError: no layer feeds another, or the layers do not have the multipliers of the
                parametrization.
        """
        feeding = {path for layer in layers for path in layer.predecessors}
        kept = tuple(x for x in layers if x.predecessors or x.path in feeding)
        if len(kept) < 2:
            raise ValueError(
                f"max_lr: got layers {[x.path for x in layers]}, of which none feeds another, "
                "expected an embedding and a readout at least"
            )
        chosen = parametrization_named(parametrization)
        kinds = [0 if not x.predecessors else 1 if x.path in feeding else 2 for x in kept]
        a, b = ([float(part[kind]) for kind in kinds] for part in (chosen.a, chosen.b))
        tied = _tied(kept)
        for first, *others in tied:
            for i in others:
                a[i], b[i] = a[i] + b[i] - b[first], b[first]
        is_needed = is_applied and isinstance(parametrization, str) and any(chosen.a)
        _check_multipliers(kept, a, chosen, is_needed)
        return cls(kept, tuple(a), tuple(b), rule, tuple(kinds), tied)

    @property
    def paths(self) -> list[str]:
        """Paths of the layers, as in reports."""
        return [layer.path for layer in self.layers]

    @property
    def unstable(self) -> str:
        """The layer whose output grows or vanishes with width before training; "" if none does."""
        sources, sinks = ([i for i, k in enumerate(self.kinds) if k == kind] for kind in (0, 2))
        return unstable_at_initialisation(self.a, self.b, sources, sinks)

    def solve(self, ratios: Mapping[str, Ratios], **options: Any) -> MaxLRSolution:
        """Call `solve_max_lr` with these alignments, and full alignment where one is missing.

        Args:
            ratios: (alpha, omega, u) by layer.
            options: further arguments of `solve_max_lr`.
        """
        places = {path: i for i, path in enumerate(self.paths)}
        # An excluded layer has no alignments: its fan-in is too small for a logarithm.
        known = [
            (None,) * 3 if layer.role == "excluded" else ratios.get(layer.path, (None,) * 3)
            for layer in self.layers
        ]
        alpha, omega, u = (list(values) for values in zip(*known, strict=True))
        return solve_max_lr(
            optimizer=self.rule,
            a=self.a,
            b=self.b,
            alpha=alpha,
            omega=omega,
            u=u,
            predecessors=[[places[p] for p in x.predecessors] for x in self.layers],
            tied=self.tied,
            frozen=[i for i, layer in enumerate(self.layers) if not layer.parameters],
            fixed=[i for i, layer in enumerate(self.layers) if layer.role == "excluded"],
            **options,
        )


def _check_multipliers(
    layers: Sequence[AlignedLayer], a: Sequence[float], chosen: Parametrization, is_needed: bool
) -> None:
    """Check that if any layer has or needs a multiplier, each has that of this parametrization."""
    found = [multiplier_of(layer.module, layer.name) for layer in layers]
    for layer, multiplier, exponent in zip(layers, found, a, strict=True):
        own = 0.0 if multiplier is None else multiplier.exponent
        expected = 0.0 if layer.role == "excluded" else exponent
        if (is_needed or any(found)) and not isclose(own, expected, abs_tol=1e-6):
            raise ValueError(
                f"max_lr: the weight of {layer.path!r} is multiplied by n^{0 - own:g}, with "
                f"parametrization={chosen.name!r} expected by n^{0 - expected:g}: give the "
                "parametrization that parametrize_model was given, or a Parametrization if the "
                "model's own code multiplies"
            )


def ratios_of(readings: Mapping[str, AlignmentReading]) -> dict[str, Ratios]:
    """Return (alpha, omega, u) of each layer's reading."""
    return {path: (r.alpha, r.omega, r.u) for path, r in readings.items()}


def clipped(ratios: Mapping[str, Ratios]) -> dict[str, Ratios]:
    """Clip alpha and u to [½, 1] and omega to [0, 1]; values outside are due to cancellation."""
    return {
        path: (_between(alpha, 0.5), _between(omega, 0.0), _between(u, 0.5))
        for path, (alpha, omega, u) in ratios.items()
    }


def _tied(layers: Sequence[AlignedLayer]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for i, layer in enumerate(layers):
        shared = next((groups[id(p)] for p in layer.parameters if id(p) in groups), [])
        shared.append(i)
        for p in layer.parameters:
            groups[id(p)] = shared
    unique = {id(group): group for group in groups.values() if len(group) > 1}
    return tuple(tuple(group) for group in unique.values())


def _between(value: float | None, low: float) -> float | None:
    return None if value is None else min(max(value, low), 1.0)
