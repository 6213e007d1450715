"""Check of whether a contribution from another rank is consistent in itself.

Decoding (`messages.py`) ensures the types of a `RankContribution`, but not that its counts and
indices match its arrays. The merge checks that it matches other ranks' contributions.
"""

from adiv_monitor.maths.attention_sums import AttentionSums
from adiv_monitor.maths.sums import REALISED, Array, Blocks, LayerSums, Moved, Vector, pairs_of
from adiv_monitor.step.messages import Malformed
from adiv_monitor.step.rank_contribution import RankContribution


def check(part: RankContribution) -> None:
    """Check that a contribution is like those from `prepared`.

    Raises:
        Malformed: the contribution is inconsistent.
    """
    for path, layer in part.layers.items():
        if not _is_sound(layer):
            raise Malformed(f"layer '{path}' has another number of values than it declares")
    for path, sums in part.attention.items():
        if not _has_samples(sums):
            raise Malformed(f"attention '{path}' has another number of values than it declares")


def _has_samples(sums: AttentionSums[Array]) -> bool:
    moves = [move for move in (sums.e, sums.d) if move is not None]
    of_samples = [part for move in moves for part in (move.G, move.square)]
    single = [sums.broken]
    if (scale := sums.scale) is not None:
        of_samples += [scale.count, scale.sum, scale.square]
        single += [scale.error]
    shape = sums.shape
    return (
        all(array.shape == shape for array in of_samples)
        and all(array.shape == () for array in single)
        and len(shape) == 2
        and shape[0] <= sums.samples
        and (sums.G_G is not None or not moves)
    )


def _is_sound(layer: LayerSums[Array]) -> bool:
    rows, blocks, common = layer.sampled, layer.blocks, layer.common
    of_rows = [
        *(rows.keys, layer.scale),
        *(() if blocks is None else (blocks.sums, blocks.norms, blocks.largest)),
        *(() if common is None else (common.products, common.norms)),
    ]
    has_own, has_rest = (vector in layer.vectors for vector in (Vector.OWN, Vector.REST))
    return (
        0 <= rows.seen <= rows.total
        and rows.keys is not None
        and layer.parameters is not None
        and all(of is None or of.shape == (rows.seen,) for of in of_rows)
        and layer.products.shape == (rows.seen, len(pairs_of(layer.vectors)))
        and (layer.realised is None or _is_of_rows(layer.realised))
        and has_own == (blocks is not None)
        and has_rest == (blocks is not None or layer.scale is not None)
        and (blocks is None or (blocks.groups > 0 and _has_rows(blocks, rows.seen)))
    )


def _is_of_rows(moved: Moved[Array]) -> bool:
    shape = moved.products.shape
    return len(shape) == 2 and shape[1] == len(REALISED) and shape[0] <= moved.total


def _has_rows(blocks: Blocks[Array], seen: int) -> bool:
    """Whether each of the scales belongs to one of the `seen` rows."""
    rows, count = blocks.entry_rows, len(blocks.entries) if blocks.entries.ndim == 1 else -1
    if rows is None:
        return count == seen * blocks.groups
    return rows.shape == (count,) and bool(((rows >= 0) & (rows < seen)).all())
