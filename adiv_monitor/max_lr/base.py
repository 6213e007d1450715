"""Ratios of a model's widths to its base, the width at which a parametrization changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.max_lr.multiplier import multiplier_of


def checked_layers(argument: str, given: Sequence[AlignedLayer]) -> Sequence[AlignedLayer]:
    """Return the layers.

    Raises:
        TypeError: they are no layers, but a model or an `Alignment`, for example.
    """
    if not isinstance(given, Sequence) or not all(isinstance(x, AlignedLayer) for x in given):
        raise TypeError(
            f"{argument}: got {type(given).__name__}, expected a model's layers: "
            "Alignment(model, probe).layers"
        )
    return given


@dataclass(frozen=True, eq=False)
class Base:
    """Ratios of widths to those of a base model; without one, to 1.

    Attributes:
        layers: layers of the base model by path; empty without a base.
        vectors: lengths in the base model, by id of the model's biases, gains and the like.
    """

    layers: Mapping[str, AlignedLayer]
    vectors: Mapping[int, int]

    @classmethod
    def of(cls, layers: Sequence[AlignedLayer], base: Sequence[AlignedLayer] | None) -> "Base":
        """Return the base of these layers.

        Raises:
            ValueError: the base has other layers, or multipliers.
        """
        if base is None:
            return cls({}, {})
        base = checked_layers("base=…", base)
        named = {layer.path: layer for layer in base}
        paths = [layer.path for layer in layers]
        if paths != list(named):
            strange = next((x for x in [*paths, *named] if (x in named) != (x in paths)), paths[0])
            raise ValueError(
                f"base=…: {strange!r} is a layer of one of the two models only, expected the "
                "layers of the same model at another width: Alignment(build(64), probe).layers"
            )
        if made := [x.path for x in base if multiplier_of(x.module, x.name) is not None]:
            raise ValueError(
                f"base=…: {made[0]!r} of the base has a multiplier, expected a model that was not "
                "parametrized: build it anew"
            )
        lengths = {
            id(own): at_base.numel()
            for layer in layers
            for own, at_base in zip(layer.entrywise, named[layer.path].entrywise, strict=True)
        }
        return cls(named, lengths)

    def ratio(self, layer: AlignedLayer) -> float:
        """Return n/n₀ of a layer."""
        if not self.layers:
            return layer.width
        at_base = self.layers[layer.path]
        return layer.width / (at_base.fan_out if layer.role == "embedding" else at_base.fan_in)

    def ratio_of_groups(self, layer: AlignedLayer) -> float:
        """Return k/k₀ of a layer, by which its width has grown more than its fan-in."""
        return layer.groups / (self.layers[layer.path].groups if self.layers else 1)

    def ratio_of_vector(self, vector: int, length: int) -> float:
        """Return n/n₀ of a bias, a gain or the like; 1 if it acts on no output of a layer.

        Args:
            vector: id of the parameter.
            length: number of its entries.
        """
        return length / self.vectors.get(vector, length) if self.layers else length

    def sigma(self, layer: AlignedLayer, place: int) -> float:
        """Return σ of a layer's parameter: its root mean square in the base model; 1 without one.

        Without a base, σ of an embedding that is a linear layer or a convolution is 1 over the root
        of the fan-in, which does not grow with width.
        """
        if self.layers:
            initial = self.layers[layer.path].weights[place].detach()
            return float(initial.square().mean().sqrt())
        looked_up = layer.role != "embedding" or layer.is_table
        return 1.0 if looked_up else layer.fan_in**-0.5
