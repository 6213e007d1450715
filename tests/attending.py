"""Models with attention, and attention with explicit scores, for the tests of attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, TOKENS = 3, 4


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropped: Tensor | float = 1.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the scores Y, which retain their gradient, and the output, as torch documents it."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    Y = query @ key.mT
    if Y.requires_grad:
        Y.retain_grad()
    bias = torch.zeros(Y.shape, dtype=Y.dtype)
    if is_causal:
        bias.masked_fill_(~torch.ones(Y.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        bias = bias + attn_mask
    logits = Y * (query.shape[-1] ** -0.5 if scale is None else scale) + bias
    # A query whose keys are all masked yields zeros; a softmax over -inf alone would be NaN.
    none = (logits == -torch.inf).all(-1, keepdim=True)
    P = torch.softmax(logits.masked_fill(none, 0.0), -1).masked_fill(none, 0.0)
    return Y, (P * dropped) @ value


class Spy:
    """Replacement for the fused attention function that records its inputs and explicit scores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.outputs: list[Tensor] = []
        monkeypatch.setattr(functional, "scaled_dot_product_attention", self)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        dropout_p: float = 0.0,
        **k: Any,
    ) -> Tensor:
        if args:  # torch's own attention passes them by position
            mask, dropout_p, causal = args
            k = {"attn_mask": mask, "is_causal": causal}
        dropped: Tensor | float = 1.0
        if dropout_p:  # the same draw as torch's on a CPU
            drawn = query.new_empty(*query.shape[:-1], key.shape[-2]).bernoulli_(1 - dropout_p)
            dropped = drawn / (1 - dropout_p)
        Y, output = explicit(query, key, value, dropped=dropped, **k)
        if output.requires_grad:
            output.retain_grad()
        self.queries.append(query.detach())
        self.keys.append(key.detach())
        self.scores.append(Y)
        self.outputs.append(output)
        return output


class Attending(nn.Module):
    """A model of one `nn.MultiheadAttention`."""

    def __init__(self, *, mask: Tensor | None = None, padding: bool = False, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, **options)
        self.mask = mask
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        padding = None
        if self.padding:
            padding = torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)
            padding[1, 2:] = True
        mask = self.mask
        if mask is not None and mask.dim() == 3:
            mask = mask.expand(3 * SAMPLES, TOKENS, TOKENS)
        batch_first = self.attention.batch_first
        x = x if batch_first else x.transpose(0, 1)
        key, value = x.flip(-1)[..., : self.attention.kdim], x[..., : self.attention.vdim]
        out, _ = self.attention(
            x, key, value, key_padding_mask=padding, attn_mask=mask, need_weights=False
        )
        return out if batch_first else out.transpose(0, 1)


class LowRank(nn.Module):
    """Frozen projections plus a trained low-rank part, in place, and a random number drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12).requires_grad_(False) for _ in "qkv")
        self.down = nn.Linear(12, 3, bias=False)
        self.up = nn.Linear(3, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(self.down(x + 0 * torch.rand(())))
        q *= 2
        q += self.q(x)
        q, k, v = (z.view(len(x), TOKENS, 3, 4).transpose(1, 2) for z in (q, self.k(x), self.v(x)))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def root_mean_square(m: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm without the rounding to float32 of the transformers library's own."""
    return m.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def of_embeddings(m: nn.Module, x: Tensor) -> Tensor:
    """Call a language model of the transformers library, with the start of a sample masked."""
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    mask[2, :2] = 0
    return m.model(inputs_embeds=x, attention_mask=mask).last_hidden_state


def language(name: str, **options: Any) -> Callable[[], tuple[nn.Module, str]]:
    def build() -> tuple[nn.Module, str]:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(vocab_size=11, **options)
        config._attn_implementation = "sdpa"
        model = Computes(of_embeddings, model=getattr(transformers, f"{name}Model")(config))
        for path, module in list(model.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                model.set_submodule(path, Computes(root_mean_square, weight=module.weight))
        paths = [p for p, m in model.named_modules() if type(m).__name__.endswith("Attention")]
        return model, paths[-1]

    return build


def torch_attention(**options: Any) -> Callable[[], tuple[nn.Module, str]]:
    return lambda: (Attending(**options), "attention")


SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 16}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
MODELS: dict[str, Callable[[], tuple[nn.Module, str]]] = {
    "torch": torch_attention(batch_first=True),
    "torch, no bias": torch_attention(batch_first=True, bias=False),
    "torch, batch second": torch_attention(padding=True),
    "torch, separate weights": torch_attention(kdim=4, vdim=7, batch_first=True),
    "torch, mask": torch_attention(mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)),
    "torch, mask of heads": torch_attention(
        mask=tensors((3 * SAMPLES, TOKENS, TOKENS))[0], batch_first=True
    ),
    "low rank": lambda: (LowRank(), ""),
    "llama": language("Llama", **SMALL, **GROUPED),
    "qwen3": language("Qwen3", **SMALL, **GROUPED),
    "olmo2": language("Olmo2", **SMALL, num_attention_heads=3, num_key_value_heads=3),
    "gpt2": language(
        "GPT2", n_embd=12, n_layer=2, n_head=3, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    ),
    "gpt_neox": language("GPTNeoX", **SMALL, num_attention_heads=3, rotary_pct=0.5),
}
