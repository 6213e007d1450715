"""Whether a part that came from another process can be put together with others.

Its types are those of a `Part` (`messages.py`). But its numbers index each other, and say how many
there are of others; whether these are like other processes' is asked when they are put together.
"""

from adiv_monitor.maths.readings import REALISED
from adiv_monitor.step.messages import Malformed
from adiv_monitor.step.part import LayerPart, Part
from adiv_monitor.step.rows_together import OF_ROWS


def check(part: Part) -> None:
    """A part as `prepared` makes it.

    Raises:
        Malformed: it is not.
    """
    for path, layer in part.layers.items():
        if layer.looked.path != path or not _is_sound(layer):
            raise Malformed(f"layer '{path}' has not as many numbers as it says")
    if part.attended.keys() != part.attention.keys():
        raise Malformed("attentions without their numbers")
    for path, values in part.attention.items():
        samples = len(values["G_G"]) if "G_G" in values and values["G_G"].ndim == 2 else -1
        rows = [array for array in values.values() if array.ndim]
        alike = all(array.ndim == 2 and len(array) == samples for array in rows)
        if not (alike and 0 <= samples <= part.attended[path].samples):
            raise Malformed(f"attention '{path}' has not as many numbers as it says")


def _is_sound(layer: LayerPart) -> bool:
    looked, values, drawn = layer.looked, layer.values, layer.draw
    seen, entries = looked.rows_seen, values.get("scale_entries_of_rows")
    of_rows = {name: values[name] for name in OF_ROWS if name in values}
    sizes = {"products": len(looked.vectors), "realised": len(REALISED)}
    columns = {name: (size * (size + 1) // 2,) for name, size in sizes.items()}
    return (
        0 <= seen <= looked.rows_total
        and looked.groups > 0
        and drawn is not None
        and drawn.keys.shape == (seen,)
        and "gamma_gamma" in layer.dots
        and "products" in values
        and all(array.shape == (seen, *columns.get(n, ())) for n, array in of_rows.items())
        and ("scale_pivot" in values) == (entries is not None)
        and (entries is None or _has_rows(layer, len(entries) if entries.ndim == 1 else -1))
    )


def _has_rows(layer: LayerPart, count: int) -> bool:
    """Whether so many scales are each of one of the layer's rows."""
    looked, rows = layer.looked, layer.looked.entry_rows
    if rows is None:
        return count == looked.rows_seen * looked.groups
    return rows.shape == (count,) and bool(((rows >= 0) & (rows < looked.rows_seen)).all())
