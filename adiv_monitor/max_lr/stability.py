"""How much features and gradients change with width: the constraints, as they are.

r of a layer is −lim log_n RMS(change of its output): 0, a change of order one; above 0, one that
vanishes with width; below 0, one that blows up.
"""

import math
from collections.abc import Sequence

from adiv_monitor.max_lr.exponents import Exponents
from adiv_monitor.max_lr.network import Alignments, Network


def update_exponents(network: Network, c: Sequence[float]) -> Exponents:
    """k: multiplier × update of each layer is n^(−k)."""
    G = feature_gradient_exponent(network, c)
    terms = zip(network.p, c, network.s, strict=True)
    return tuple(p + c + s * G for p, c, s in terms)


def feature_gradient_exponent(network: Network, c: Sequence[float]) -> float:
    """G: gradients of features before a readout are n^(−G).

    G = min(a + b, p + c) of the readouts: through their initial weights, or through their updates.
    """
    return min(
        min(network.a[i] + network.b[i], network.p[i] + c[i])
        if i not in network.frozen
        # A readout that never moves has its initial weights alone.
        else network.a[i] + network.b[i]
        for i in network.sinks
    )


def gradient_exponents(network: Network, c: Sequence[float]) -> Exponents:
    """g: ∂L/∂W of each layer is n^(−g). An optimizer's ε must shrink so to stay as small.

    g = a + G, and a where nothing follows.
    """
    G = feature_gradient_exponent(network, c)
    return tuple(a + (0 if i in network.sinks else G) for i, a in enumerate(network.a))


def feature_change(network: Network, alignments: Alignments, c: Sequence[float]) -> Exponents:
    """R of every layer.

    r = min(k − alpha, k + ρ − u, a + b + ρ − omega), ρ the least r among the predecessors, and k in
    embeddings. A frozen layer has no update, so only the third term; ∞ where nothing changes.
    """
    k = update_exponents(network, c)
    r: list[float] = []
    for i, before in enumerate(network.predecessors):
        own = math.inf if i in network.frozen else k[i]
        if not before:
            r.append(own)
            continue
        rho = min(r[j] for j in before)
        terms = own - alignments.alpha[i], own + rho - alignments.u[i]
        r.append(min(*terms, network.a[i] + network.b[i] + rho - alignments.omega[i]))
    return tuple(r)
