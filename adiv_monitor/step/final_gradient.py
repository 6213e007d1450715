"""Begins the measurement of every layer once the gradients are final: rows, e and evidence."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.captured_layer import CapturedLayer
from adiv_monitor.capture.gradient_shares import total_of
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.names import class_name
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Parts
from adiv_monitor.capture.weights.shards import holders, is_shard
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.features import DenseFeatures, Features, JacobianFeatures, OneHotFeatures
from adiv_monitor.features.rows import Whole, joined, to_compute_dtype
from adiv_monitor.maths import totals
from adiv_monitor.maths.alike import Fail
from adiv_monitor.maths.ceiling import KNOWN
from adiv_monitor.maths.records import replaced
from adiv_monitor.maths.sums import (
    About,
    CeilingSums,
    Evidence,
    LayerSums,
    Sampled,
    Totals,
)
from adiv_monitor.maths.totals import AllRows
from adiv_monitor.step.parameter_steps import ParameterSteps
from adiv_monitor.step.rank_contribution import PieceShares
from adiv_monitor.step.row_moves import act, added, gram_is_less, probe
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.unsharded import UnshardedParameters
from adiv_monitor.step.vectors import Block, LayerInProgress, blocks_of

# With Jacobian features there is no mean feature, and no parameter is known to be a bias.
_WITHOUT_FEATURES = ("common_share", "bias_share")
# The most numbers of a layer that a rank sends for the ceiling: 8 MiB, half a second to decompose.
_MOST_SUMS = 2**20
# Reasons for a missing attainable_cosine.
_TOO_LARGE = "with several ranks it needs sums that are too large to be sent."
_SUMMED = (
    "several backward passes went through one forward pass, so only sums of their rows are known."
)
_COMPUTED = "its weight is computed from parameters, which may not be able to produce every weight."


class FinalGradient:
    """Begins the measured layers when the gradients are those that the optimizer will use.

    Args:
        captured: the layers that a gradient reached; a layer is removed as it begins, so that its
            rows are released.
        history: the habits that this run has shown so far.
        unsharded: the gradients and rows that ranks hold together.
        steps: the gradients of all pieces.
        scale: the number by which a fused optimizer divides the gradients (AMP); None: 1.
        generator: the monitor's own random numbers.

    Attributes:
        measured: by path, the layers that have begun.
        pieces: by path, the share of the layer's dot products of parameters that counts here.
        without_ceiling: paths of the layers without attainable_cosine, by the reason.
        moved: paths of layers whose parameters were written to since the backward pass.
        totals: by paths, the stacked sums over all rows.
        blocks: the measured layers' rows, once all have begun.
    """

    def __init__(
        self,
        captured: dict[Layer, CapturedLayer],
        history: RunHistory,
        unsharded: UnshardedParameters,
        steps: ParameterSteps,
        scale: Tensor | None,
        generator: np.random.Generator,
    ) -> None:
        self.measured: dict[str, LayerInProgress] = {}
        self.pieces: dict[str, PieceShares] = {}
        self.without_ceiling: dict[str, list[str]] = {
            why: [] for why in (_TOO_LARGE, _SUMMED, _COMPUTED)
        }
        self.moved: list[str] = []
        self.totals: dict[tuple[str, ...], Totals[Tensor]] = {}
        self._captured = captured
        self._is_alone = world_size() == 1
        self._history = history
        self._unsharded = unsharded
        self._steps = steps
        self._scale = scale
        self._generator = generator
        self._all_rows: dict[str, list[AllRows]] = {}
        self.blocks: list[Block] = []
        self._factors = self._factors_of(captured)

    def forget(self, path: str) -> None:
        """Drop a layer from this step."""
        self.measured.pop(path, None)
        self._all_rows.pop(path, None)

    def _factors_of(self, captured: Mapping[Layer, CapturedLayer]) -> dict[str, Tensor]:
        """Return ‖gradient now‖ / ‖gradient after backward‖ of each layer for which it is known."""
        if not self._is_alone:  # one rank holds only a part of the gradient
            return {}
        left = {layer: found.accumulation.left() for layer, found in captured.items()}
        known = {layer: parts for layer, parts in left.items() if parts is not None}
        if not known:
            return {}
        parts = self._now([layer.parameters[0] for layer in known])
        norms = torch._foreach_norm([to_compute_dtype(part) for part in (*parts, *known.values())])
        # 0/0 becomes 1: a gradient of zero has no units.
        ends = torch._foreach_add(norms, torch.finfo(torch.float32).tiny)
        factors = torch._foreach_div(ends[: len(known)], ends[len(known) :])
        if self._scale is not None:
            factors = torch._foreach_div(factors, self._scale)
        return {layer.path: factor for layer, factor in zip(known, factors, strict=True)}

    def _now(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return tensors with the gradients' norms, or with those of sampled entries of shards."""
        norms = self._steps.gamma_norms(parameters)
        return [
            self._steps.entries_of(p) if is_shard(p) else norm
            for p, norm in zip(parameters, norms, strict=True)
        ]

    def begin(self, layer: Layer, parts: Parts) -> None:
        """Begin a layer: join the rows of its calls, compute e, and release the captured rows.

        Args:
            layer: the layer.
            parts: γ of the pieces that were all-gathered.
        """
        captured, factor = self._captured.pop(layer), self._factors.get(layer.path)
        calls = captured.calls
        features, G = _joined_rows(calls)
        sampled = Sampled(
            seen=G.shape[0],
            total=sum([call.rows.total for call in calls]),
        )
        shares = {p.key: 1 / holders(p.parameter) if parts else 1.0 for p in layer.pieces}
        self.pieces[layer.path] = shares, bool(parts)
        reason = _why_from_rows(features, shared=captured.is_shared)
        evidence = self._evidence(captured, reason, factor)
        attainable, ceiling = self._of_ceiling(captured)
        self._keep_all_rows(layer.path, calls)
        gamma = {**{piece.key: self._steps.gamma(piece) for piece in layer.pieces}, **parts}
        e = None
        # With several ranks γ also holds the rows of the others.
        trusted = self._is_alone and not reason
        trusted = trusted and layer.path not in self._history.distrusted
        if sampled.seen == sampled.total and trusted and gram_is_less(features, layer, G):
            # e = (ΦΦᵀ)G, which is right only if γ = GᵀΦ: the probe tests that.
            G, factor = G if factor is None else G * factor.to(G), None
            e = features.gram() @ G
            probed = probe(layer, features, G, gamma, self._generator)
            evidence = replaced(evidence, probe=probed)
        elif parts:
            e = added(*act(layer.change(gamma), features))
            e = e if self._scale is None else e / self._scale
        sums = LayerSums(
            _about(layer, features),
            sampled,
            vectors=(),
            products=G.new_empty(0),
            evidence=evidence,
            attainable=attainable,
            ceiling=ceiling,
        )
        z = joined([call.z for call in calls])
        change = layer.change(gamma)
        self.measured[layer.path] = LayerInProgress(layer, features, sums, G, factor, z, change, e)
        captured.rows.release()

    def finish(self, lose: Fail, *, updates: bool) -> None:
        """Compute e of all layers and the sums over all rows, after all layers have begun.

        Args:
            lose: called with a layer's path and the exception that was raised.
            updates: whether an optimizer step follows.
        """
        self.totals = totals.sums(self._all_rows, self._generator)
        self._all_rows.clear()
        self.blocks = blocks_of([*self.measured.values()], lose, updates=updates)
        for block in self.blocks:
            block.plain_step(self._scale, lose)

    def _evidence(
        self,
        captured: CapturedLayer,
        reason: str,
        factor: Tensor | None,
    ) -> Evidence[Tensor]:
        """Collect the evidence for γ = c·GᵀΦ that was recorded while the rows were gathered."""
        layer, calls, accumulated = captured.layer, captured.calls, captured.accumulation
        lead = layer.parameters[0]
        if captured.is_moved:
            self.moved.append(layer.path)
        then = accumulated.entries
        now: list[Tensor | None] = [None] * (len(captured.shares) or 1)
        contributed: list[Tensor | None] = []
        if then is not None:
            now[0] = self._unsharded.entries.get(id(lead))
        followed = self._is_alone and layer.is_direct and bool(captured.shares)
        for place, shares in enumerate(captured.shares):
            for share in shares:
                followed &= share.is_known and share.has_rows
            total = total_of(shares)
            contributed.append(total)
            if total is not None:
                now[place] = self._steps.entries_of(shares[0].parameter)
        if then is not None and now[0] is None:
            now[0] = self._steps.entries_of(lead)
        replay_errors = [call.replay_error for call in calls if call.replay_error is not None]
        return Evidence(
            precision=max([call.precision for call in calls]),
            reason=reason,
            followed=followed,
            factor=factor,
            then=then,
            now=tuple(now),
            contributed=tuple(contributed),
            since=None if self._is_alone else accumulated.since_ended(),
            foreign=accumulated.foreign,
            rule_error=captured.rows.linear,
            replay_error=torch.stack(replay_errors).amax() if replay_errors else None,
        )

    def _of_ceiling(
        self, captured: CapturedLayer
    ) -> tuple[Tensor | None, CeilingSums[Tensor] | None]:
        """Return `attainable_cosine`, or with several ranks the sums from which it follows."""
        path, rows = captured.layer.path, captured.rows
        ceiling, is_whole = rows.ceiling, rows.ceiling_is_whole
        if ceiling is not None and not captured.layer.is_direct:
            self.without_ceiling[_COMPUTED].append(path)
        elif not is_whole and isinstance(captured.calls[0].features, KNOWN):
            self.without_ceiling[_SUMMED].append(path)
        elif ceiling is not None and self._is_alone:
            return ceiling.cosine(), None
        elif ceiling is not None:
            sums = ceiling.sums()
            if sum(part.numel() for part in sums) <= _MOST_SUMS:
                return None, CeilingSums(*sums)
            self.without_ceiling[_TOO_LARGE].append(path)
        return None, None

    def _keep_all_rows(self, path: str, calls: Sequence[Call]) -> None:
        """Keep the lengths of all rows, if every call has them."""
        of_calls = [_all_rows(call.whole, call.norms) for call in calls if call.norms is not None]
        if len(of_calls) == len(calls):  # after two passes through one graph it is unknown
            self._all_rows[path] = of_calls


def _joined_rows(calls: Sequence[Call]) -> tuple[Features, Tensor]:
    """Return features and ∂L/∂z of the rows of all calls."""
    features = calls[0].features
    if calls[1:]:
        features = features.joined([call.features for call in calls[1:]])
    G = joined([call.gradient for call in calls if call.gradient is not None])
    if isinstance(features, OneHotFeatures):  # the padding token is not trained
        G = G * features.trained[:, None]
    return features, G


def _all_rows(whole: Whole | None, norms: Tensor) -> AllRows:
    """Return the lengths of all rows of one call."""
    if whole is None:
        return AllRows(norms)
    trained = norms if whole.trained is None else norms * whole.trained
    return AllRows(trained, whole.norm, whole.bias_square)


def _about(layer: Layer, features: Features) -> About:
    phi = features.phi if isinstance(features, DenseFeatures) else None
    return About(
        kind=layer.kind,
        module=class_name(layer.module),
        features=None if phi is None else phi.shape[-1],
        bias_alone=layer.weight is None,
        undefined=_WITHOUT_FEATURES if isinstance(features, JacobianFeatures) else (),
    )


def _why_from_rows(features: Features, *, shared: bool) -> str:
    """Return the reason, if known in advance, why γ is not GᵀΦ of these rows; else ""."""
    if shared:
        return "shared"
    weighs = isinstance(features, DenseFeatures) and (
        features.mixes_rows or features.weight_gain is not None
    )
    return "weighed" if weighs else ""  # gradient-only layers weigh rows by design
