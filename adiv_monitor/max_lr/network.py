"""What the solver is told of a network: its layers, which feeds which, how they are aligned."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from adiv_monitor.max_lr.exponents import Exponents
from adiv_monitor.max_lr.optimizers import UpdateRule

FULL_ALPHA, FULL_OMEGA, FULL_U = 1.0, 0.5, 1.0  # "full alignment", after some training


@dataclass(frozen=True)
class Network:
    """Layers in an order in which they can run, with the exponents that don't change.

    Attributes:
        a: exponents of the multipliers.
        b: exponents of the initialisation.
        rule: the optimizer's.
        predecessors: of each layer, those from whose outputs its input is made, by sums,
            concatenation or products; () for an embedding.
        tied: groups of layers that share one weight, and so one learning rate.
        frozen: layers that don't learn.
        fixed: layers whose learning rate is to stay what it is under full alignment.
    """

    a: Exponents
    b: Exponents
    rule: UpdateRule
    predecessors: tuple[tuple[int, ...], ...]
    tied: tuple[tuple[int, ...], ...] = ()
    frozen: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.a)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Embeddings: layers whose input is data."""
        return tuple(layer for layer, before in enumerate(self.predecessors) if not before)

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Readouts: layers that feed no other."""
        feeding = {layer for before in self.predecessors for layer in before}
        return tuple(layer for layer in range(len(self)) if layer not in feeding)

    @cached_property
    def p(self) -> Exponents:
        """The part of the update's exponent that does not depend on the rate."""
        kinds = [0 if i in self.sources else 2 if i in self.sinks else 1 for i in range(len(self))]
        return tuple(
            self.rule.from_a * a + self.rule.from_b * b + self.rule.h[kind]
            for a, b, kind in zip(self.a, self.b, kinds, strict=True)
        )

    @cached_property
    def s(self) -> tuple[int, ...]:
        """Whether the update shrinks as the gradient of the features does."""
        follows = self.rule.follows_gradient
        return tuple(int(follows and layer not in self.sinks) for layer in range(len(self)))


@dataclass(frozen=True)
class Alignments:
    """alpha, omega and u of every layer; those of embeddings are never used."""

    alpha: Exponents
    omega: Exponents
    u: Exponents


def full_alignment(layers: int) -> Alignments:
    """(1, ½, 1): updates are in line with what they act on, initial weights know of nothing."""
    return Alignments(*((value,) * layers for value in (FULL_ALPHA, FULL_OMEGA, FULL_U)))


def chain(layers: int) -> tuple[tuple[int, ...], ...]:
    """Predecessors where every layer feeds the next."""
    return ((), *((layer - 1,) for layer in range(1, layers)))


def checked_predecessors(
    given: Sequence[Collection[int]] | None, layers: int
) -> tuple[tuple[int, ...], ...]:
    """The predecessors, or those of a chain.

    Raises:
        ValueError: they are of another number of layers, or not in an order in which layers run.
    """
    if given is None:
        return chain(layers)
    if len(given) != layers:
        raise ValueError(f"predecessors: got {len(given)} entries for {layers} layers")
    for layer, before in enumerate(given):
        if wrong := [i for i in before if not 0 <= i < layer]:
            raise ValueError(
                f"predecessors[{layer}]: got {wrong[0]}, expected numbers of layers before it "
                f"(0 to {layer - 1}); put the layers in the order in which they run"
            )
    return tuple(tuple(sorted(set(before))) for before in given)


def checked_layers(name: str, given: Collection[int], layers: int) -> frozenset[int]:
    """A set of layers.

    Raises:
        ValueError: there is no layer of that number.
    """
    if wrong := [i for i in given if not 0 <= i < layers]:
        raise ValueError(f"{name}: got {wrong[0]}, expected numbers of layers, 0 to {layers - 1}")
    return frozenset(given)
