"""Merging of several ranks' attention records into a sample of all samples."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from adiv_monitor.capture.sampling import draw, winners
from adiv_monitor.maths.attention_sums import AttentionSums, map_samples, merge
from adiv_monitor.maths.sums import Array
from adiv_monitor.step.rank_contribution import RankContribution


def merge_attention(
    whole: RankContribution, several: Sequence[RankContribution], generator: np.random.Generator
) -> RankContribution:
    """Return the merged contribution with the merged attention records.

    Args:
        whole: the merged contribution without attention.
        several: contributions of the ranks.
        generator: random generator.
    """
    refused = {path: why for part in several for path, why in part.no_attention.items()}
    attention = {}
    for path in dict.fromkeys(path for part in several for path in part.attention):
        own = [part.attention[path] for part in several if path in part.attention]
        alike = [sums for sums in own if sums.G_G.shape[1] == own[0].G_G.shape[1]]
        if path not in refused:
            attention[path] = merge(_sampled(alike, generator))
    return replace(whole, attention=attention, no_attention=refused)


def _sampled(
    several: Sequence[AttentionSums[Array]], generator: np.random.Generator
) -> list[AttentionSums[Array]]:
    """Return the records with as many samples as form a uniform sample of all samples."""
    draws = [draw((sums.samples,), len(sums.G_G), np.inf, generator) for sums in several]
    return [
        sums if kept is None else map_samples(sums, partial(np.take, indices=kept, axis=0))
        for sums, kept in zip(several, winners(draws, None), strict=True)
    ]
