"""Changes of features and gradients with width: the constraints of stability.

r of a layer is −lim log_n RMS(change of its output). It is 0 for a change of order one, above 0 for
a change that vanishes with width, and below 0 for a change that grows with width.
"""

import math
from collections.abc import Sequence

from adiv_monitor.max_lr.exponents import Exponents
from adiv_monitor.max_lr.network import Alignments, Network


def feature_gradient_exponent(network: Network, c: Sequence[float]) -> float:
    """Return G: gradients of the features before a readout are n^(−G).

    G is the smallest of a + b (initial weights) and p + c (updates) over the readouts.
    """
    # The weights of a frozen readout stay the initial ones.
    moved = [network.p[i] + c[i] for i in network.sinks if i not in network.frozen]
    return min([*(network.a[i] + network.b[i] for i in network.sinks), *moved])


def gradient_exponents(network: Network, c: Sequence[float]) -> Exponents:
    """Return g of each layer: ∂L/∂W is n^(−g), so an optimizer's ε must shrink by n^(−g).

    g = a + G, and g = a in readouts.
    """
    G = feature_gradient_exponent(network, c)
    return tuple(a + (0 if i in network.sinks else G) for i, a in enumerate(network.a))


def feature_change(network: Network, alignments: Alignments, c: Sequence[float]) -> Exponents:
    """Return r of every layer.

    r = min(k − alpha, k + ρ − u, a + b + ρ − omega), where multiplier × update is n^(−k) and ρ is
    the smallest r of the predecessors; r = k in embeddings. A frozen layer has the third term only;
    r = ∞ if nothing changes.
    """
    G = feature_gradient_exponent(network, c)
    r: list[float] = []
    for i, before in enumerate(network.predecessors):
        own = math.inf if i in network.frozen else network.p[i] + c[i] + network.s[i] * G
        if not before:
            r.append(own)
            continue
        rho = min(r[j] for j in before)
        terms = own - alignments.alpha[i], own + rho - alignments.u[i]
        r.append(min(*terms, network.a[i] + network.b[i] + rho - alignments.omega[i]))
    return tuple(r)
