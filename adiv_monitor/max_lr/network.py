"""The solver's input: the layers of a network, their connections and alignments."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from adiv_monitor.max_lr.exponents import Exponents
from adiv_monitor.max_lr.optimizers import UpdateRule


@dataclass(frozen=True)
class Network:
    """Layers in an order in which they can run, with their constant exponents.

    Attributes:
        a: exponents of the multipliers.
        b: exponents of the initialisation.
        rule: the optimizer's rule.
        predecessors: for each layer, the layers whose outputs make up its input, by sums,
            concatenation or products; () for an embedding.
        tied: groups of layers that share one weight, and so one learning rate.
        frozen: layers that don't learn.
        fixed: layers that keep their learning rate under full alignment.
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
        """The part of the update's exponent that does not depend on the learning rate."""
        kinds = [0 if i in self.sources else 2 if i in self.sinks else 1 for i in range(len(self))]
        return tuple(
            self.rule.from_a * a + self.rule.from_b * b + self.rule.h[kind]
            for a, b, kind in zip(self.a, self.b, kinds, strict=True)
        )

    @cached_property
    def s(self) -> tuple[int, ...]:
        """1 for layers whose update shrinks as the gradient of the features does, else 0."""
        follows = self.rule.follows_gradient
        return tuple(int(follows and layer not in self.sinks) for layer in range(len(self)))


@dataclass(frozen=True)
class Alignments:
    """The values alpha, omega and u of every layer; those of embeddings are never used."""

    alpha: Exponents
    omega: Exponents
    u: Exponents


def full_alignment(layers: int) -> Alignments:
    """Return (1, ½, 1) for every layer: aligned updates, independent initial weights."""
    return Alignments((1.0,) * layers, (0.5,) * layers, (1.0,) * layers)


def chain(layers: int) -> tuple[tuple[int, ...], ...]:
    """Return the predecessors of a chain, in which every layer feeds the next."""
    return ((), *((layer - 1,) for layer in range(1, layers)))


def checked_predecessors(
    given: Sequence[Collection[int]] | None, layers: int
) -> tuple[tuple[int, ...], ...]:
    """Return the predecessors as tuples; those of a chain if none are given.

    Raises:
        ValueError: their number differs from `layers`, or a layer has a predecessor behind it.
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
    """Return a set of layers.

    Raises:
        ValueError: there is no layer with one of these numbers.
    """
    if wrong := [i for i in given if not 0 <= i < layers]:
        raise ValueError(f"{name}: got {wrong[0]}, expected numbers of layers, 0 to {layers - 1}")
    return frozenset(given)
