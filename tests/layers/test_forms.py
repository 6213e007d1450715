"""The settings of the structural forms: their meaning, and which are rejected."""

import math

import pytest
import torch
from adiv_layers.forms import (
    affine_like_constants,
    check_form,
    least_square,
    norm_like_gain,
    representable,
)


@pytest.mark.parametrize(
    ("alpha", "beta"), [(math.inf, 1), (1, math.inf), (0, 1), (1, 0), (math.nan, 1)]
)
def test_affine_like_settings_that_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match="both must be finite and not 0"):
        affine_like_constants(alpha, beta)


@pytest.mark.parametrize("beta", [1.0, 0.5, -1.0])
def test_norm_like_settings_that_are_refused(beta: float) -> None:
    for alpha in (math.inf, 0.0):
        with pytest.raises(ValueError, match="alpha must be finite and not 0"):
            norm_like_gain(alpha, beta)
    with pytest.raises(ValueError, match=r"beta must be in \[-1, 1\]"):
        norm_like_gain(2.0, 2.0)
    with pytest.raises(ValueError, match="must be positive"):
        check_form("norm-like", 1.0, beta, 0.0)


def test_signs_and_gains() -> None:
    assert affine_like_constants(-2.0, 3.0) == (1.5, -1.0)
    assert affine_like_constants(2.0, -3.0) == (-1.5, 1.0)
    assert norm_like_gain(-3.0, 0.6) == pytest.approx(-0.8)
    assert norm_like_gain(3.0, -0.6) == pytest.approx(0.8)
    assert norm_like_gain(3.0, -1.0) == 3.0


def test_eps_is_kept_above_what_would_be_flushed_to_zero() -> None:
    tiny = torch.finfo(torch.float16).tiny
    assert representable(1e-12, torch.float16) == tiny
    assert representable(1e-3, torch.float16) == 1e-3
    squares = torch.ones(2, dtype=torch.float32)
    assert least_square(1e-30, squares) == torch.finfo(torch.float32).tiny
    assert least_square(1e-3, squares) == pytest.approx(1e-6)
