"""Multi-head attention whose four projections can each be corrected."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_layers.functional import l2_norm
from adiv_layers.modules import AffineLikeLinear, NormLikeLinear

Projection = Literal["standard", "affine-like", "norm-like"]
_PROJECTIONS: dict[str, type[nn.Linear]] = {
    "standard": nn.Linear,
    "affine-like": AffineLikeLinear,
    "norm-like": NormLikeLinear,
}
_NAMES = ("q_proj", "k_proj", "v_proj")


class CorrectedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with corrected projections and, optionally, QK-norm.

    An attention score q·k moves with ‖k‖²(‖x_t‖² + 1) + ‖q‖²(‖x_s‖² + 1) (from eqn 63): correcting
    the projections removes the ‖x‖², normalising queries and keys the ‖q‖² and ‖k‖².

    The projections are modules of their own (`q_proj`, `k_proj`, `v_proj`, `out_proj`), so that
    hooks work on them. The state dict is that of `nn.MultiheadAttention` (`in_proj_weight`, …), so
    each of the two loads the other's. Its packed entries are copies: averages of weights, and
    `functional_call`, need `named_parameters()`. If q_proj, k_proj or v_proj is parametrized,
    pruned or replaced by another module, the entries of all three have their own names.

    Args:
        embed_dim: as in `nn.MultiheadAttention`, like all arguments up to dtype.
        num_heads: number of heads; divides embed_dim.
        dropout: dropout probability of the attention weights.
        bias: whether the projections learn biases.
        add_bias_kv: whether to learn an additional key and value.
        add_zero_attn: whether to add a key and value of zeros.
        kdim: width of the keys' input.
        vdim: width of the values' input.
        batch_first: (batch, length, width) rather than (length, batch, width).
        device: device of the parameters.
        dtype: dtype of the parameters.
        q_proj: projection of the queries: "standard", "affine-like" or "norm-like".
        k_proj: projection of the keys, as q_proj.
        v_proj: projection of the values, as q_proj.
        out_proj: projection of the output, as q_proj.
        qk_norm: whether to normalise queries and keys per head and use scores √d·cos(q, k); the
            factor √d keeps the scores in the range of those of d random entries.

    Raises:
        ValueError: a kind of projection is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        q_proj: Projection = "affine-like",
        k_proj: Projection = "affine-like",
        v_proj: Projection = "affine-like",
        out_proj: Projection = "affine-like",
        qk_norm: bool = False,
    ) -> None:
        # The base class draws the initial weights, which the projections then take over.
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        weights, biases = self._twin_parameters()
        for name in ("in_proj_weight", "in_proj_bias", *(f"{name}_weight" for name in _NAMES)):
            self.register_parameter(name, None)
        self.q_proj = _projection(q_proj, weights[0], biases[0])
        self.k_proj = _projection(k_proj, weights[1], biases[1])
        self.v_proj = _projection(v_proj, weights[2], biases[2])
        twin = self.out_proj
        self.out_proj = _projection(out_proj, twin.weight, twin.bias)  # type: ignore[assignment]
        self.qk_norm = qk_norm
        self.register_state_dict_post_hook(_pack)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_unpack)  # type: ignore[no-untyped-call]

    def _twin_parameters(self) -> tuple[list[Tensor], list[Tensor | None]]:
        if self._qkv_same_embed_dim:
            weights = list(self.in_proj_weight.detach().chunk(3))
        else:
            weights = [getattr(self, f"{name}_weight") for name in _NAMES]
        bias = self.in_proj_bias
        return weights, [None] * 3 if bias is None else list(bias.detach().chunk(3))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the queries to keys and values; arguments as in `nn.MultiheadAttention`.

        In addition, `is_causal` without an `attn_mask` means causal attention.

        Args:
            query: (length, batch, embed_dim), (batch, length, embed_dim) if batch_first, or
                (length, embed_dim).
            key: as query, with the keys' length and width.
            value: as query, with the keys' length and the values' width.
            key_padding_mask: (batch, keys); True for padding, or numbers to add to the scores.
            need_weights: whether to return the attention weights; then no fused kernel is used.
            attn_mask: (queries, keys) or (batch·heads, queries, keys); True where attention is
                forbidden, or numbers to add to the scores.
            average_attn_weights: whether to average the returned weights over the heads.
            is_causal: whether the mask is the causal one.

        Returns:
            The output, shaped like query, and the weights (batch, [heads,] queries, keys) or None.

        Raises:
            TypeError: a mask is neither boolean nor of floating-point numbers.
            ValueError: the inputs are not all batched or all unbatched, their batches differ in
                size, or a mask does not fit.
        """
        if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3):
            raise ValueError(
                "CorrectedMultiheadAttention: query, key and value have shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; "
                "all three must be 2-dimensional (unbatched) or all three 3-dimensional."
            )
        batched = query.dim() == 3
        batch_first = self.batch_first or not batched
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        batch = 0 if batch_first else 1
        if not query.shape[batch] == key.shape[batch] == value.shape[batch]:
            raise ValueError(
                "CorrectedMultiheadAttention: query, key and value have batches of "
                f"{query.shape[batch]}, {key.shape[batch]} and {value.shape[batch]} samples; "
                "all three must have the same size."
            )
        q, k, v = self._heads(query, key, value, batch_first)
        keys = key.shape[1 if batch_first else 0]
        if is_causal and key_padding_mask is None and not need_weights and keys == k.shape[2]:
            heads, weights = self._attend(q, k, v, None, True, False)
        else:
            if is_causal and attn_mask is None:
                ones = torch.ones(q.shape[2], keys, dtype=torch.bool, device=q.device)
                attn_mask = ones.triu(1)
            mask = _merged_mask(attn_mask, key_padding_mask, q, k, keys)
            heads, weights = self._attend(q, k, v, mask, False, need_weights)
        order = (0, 2, 1, 3) if batch_first else (2, 0, 1, 3)
        output = self.out_proj(heads.permute(order).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if batched:
            return output, weights
        return output.squeeze(0), None if weights is None else weights.squeeze(0)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, values, (batch, heads, length, head_dim), with the extra keys."""
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if not batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if self.bias_k is not None and self.bias_v is not None:
            extra = (k.shape[0], 1, self.embed_dim)
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(extra)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(extra)], 1)
        split = (self.num_heads, self.head_dim)
        q, k, v = (torch.unflatten(t, 2, split).transpose(1, 2) for t in (q, k, v))
        if self.qk_norm:
            q, k = l2_norm(q), l2_norm(k)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return weighted values, (batch, heads, queries, head_dim), and the attention weights."""
        dropout = self.dropout if self.training else 0.0
        scale = math.sqrt(self.head_dim) if self.qk_norm else 1.0 / math.sqrt(self.head_dim)
        if not need_weights:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
            ), None
        scores = (q * scale) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout)
        return weights @ v, weights

    def extra_repr(self) -> str:
        """Return the settings that no sub-module shows."""
        return f"{self.embed_dim}, {self.num_heads}" + (", qk_norm=True" if self.qk_norm else "")


def _projection(kind: str, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a projection of this kind with these values as its parameters."""
    if kind not in _PROJECTIONS:
        known = ", ".join(map(repr, _PROJECTIONS))
        raise ValueError(
            f"CorrectedMultiheadAttention: projection {kind!r}; must be one of {known}."
        )
    projection = _PROJECTIONS[kind](weight.shape[1], weight.shape[0], bias is not None, "meta")
    projection.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        projection.bias = nn.Parameter(bias.detach().clone())
    return projection


def _merged_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor, keys: int
) -> Tensor | None:
    """Merge both masks of `keys` keys into one to add to the scores; extra keys stay visible."""
    batch, heads, queries, _ = q.shape
    merged = None
    if attn_mask is not None:
        flat = (batch * heads, queries, keys)
        _check_shape("attn_mask", attn_mask, (queries, keys), flat)
        attn_mask = _additive("attn_mask", attn_mask, q.dtype, k.shape[2])
        shape = (1, 1) if attn_mask.dim() == 2 else (batch, heads)
        merged = attn_mask.view(*shape, queries, k.shape[2])
    if key_padding_mask is not None:
        _check_shape("key_padding_mask", key_padding_mask, (batch, keys))
        padding = _additive("key_padding_mask", key_padding_mask, q.dtype, k.shape[2])
        padding = padding.view(batch, 1, 1, k.shape[2])
        merged = padding if merged is None else merged + padding
    return merged


def _check_shape(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"CorrectedMultiheadAttention: {name} has shape {tuple(mask.shape)}; "
            f"must be {' or '.join(map(str, shapes))}."
        )


def _additive(name: str, mask: Tensor, dtype: torch.dtype, keys: int) -> Tensor:
    """Return numbers to add to the scores for a mask that may be boolean (True: forbidden)."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"CorrectedMultiheadAttention: {name} has dtype {mask.dtype}; must be torch.bool "
            "(True: masked), or floating-point numbers to add to the scores."
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return F.pad(mask.to(dtype), (0, keys - mask.shape[-1]))


def _pack(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Rename the projections' entries to those of `nn.MultiheadAttention`, after saving.

    Weights that are computed from other parameters have no such entries.
    """
    if any(f"{prefix}{name}.weight" not in state for name in _NAMES):
        return
    weights = [state.pop(f"{prefix}{name}.weight") for name in _NAMES]
    biases = [state.pop(f"{prefix}{name}.bias", None) for name in _NAMES]
    others = ("bias_k", "bias_v", "out_proj.weight", "out_proj.bias")
    rest = {prefix + name: state.pop(prefix + name) for name in others if prefix + name in state}
    if module._qkv_same_embed_dim:
        state[f"{prefix}in_proj_weight"] = torch.cat(weights)
    else:
        state.update({f"{prefix}{name}_weight": w for name, w in zip(_NAMES, weights, strict=True)})
    if biases[0] is not None:
        state[f"{prefix}in_proj_bias"] = torch.cat(biases)
    state.update(rest)


def _unpack(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of `nn.MultiheadAttention` to the projections', before loading."""
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{kind}", None)
        if packed is not None:
            for name, part in zip(_NAMES, packed.chunk(3), strict=True):
                state[f"{prefix}{name}.{kind}"] = part
    for name in _NAMES:
        if f"{prefix}{name}_weight" in state:
            state[f"{prefix}{name}.weight"] = state.pop(f"{prefix}{name}_weight")
