"""A layer as the backward passes of a step left it."""

from collections.abc import Sequence
from dataclasses import dataclass

from adiv_monitor.capture.accumulation import Accumulation
from adiv_monitor.capture.gradient_shares import GradientShare
from adiv_monitor.capture.layer_rows import Call, LayerRows
from adiv_monitor.capture.selection import Layer


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLayer:
    """What a captured step hands over of one layer, before the optimizer's step.

    Attributes:
        layer: the layer.
        calls: the calls through which a gradient came, with the features Φ, the outputs z and the
            gradient G of their sampled rows.
        rows: the rows of all calls, with the sums that the ceiling needs.
        accumulation: how the gradient of its first parameter came about.
        shares: for each parameter, what calls of layers contributed to its gradient; empty: not
            followed.
        is_moved: whether something wrote to its parameters since their gradient arrived.
        is_shared: whether other uses have a share in its parameters' gradient.
    """

    layer: Layer
    calls: Sequence[Call]
    rows: LayerRows
    accumulation: Accumulation
    shares: Sequence[Sequence[GradientShare]]
    is_moved: bool
    is_shared: bool
