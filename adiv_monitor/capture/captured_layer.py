"""A layer as the backward passes of a step left it."""

from dataclasses import dataclass

from adiv_monitor.capture.layer_rows import LayerRows
from adiv_monitor.capture.selection import Layer


@dataclass(frozen=True, slots=True, eq=False)
class CapturedLayer:
    """What a captured step hands over of one layer, before the optimizer's step.

    Attributes:
        layer: the layer.
        rows: the rows of all calls through which a gradient came, pass by pass.
        is_moved: whether something wrote to its parameters since their gradient arrived.
        is_shared: whether other uses have a share in its parameters' gradient.
    """

    layer: Layer
    rows: LayerRows
    is_moved: bool
    is_shared: bool
