from __future__ import annotations

import numpy as np
import pytest
import torch

from instar.backends.local import attention
from instar.backends.local.attention import (
    MAX_BIAS_TOKENS,
    TreeAttentionPlan,
    make_attention_plan,
    make_tree_bias,
    tree_attention,
)
from instar.backends.local.pack import pack
from instar.errors import BackendError
from tests.unit.backends.conformance import make_tree_samples
from tests.unit.backends.test_pack import make_visibility


@pytest.mark.parametrize("has_bias", [False, True], ids=["blocks", "bias"])
def test_tree_attention_matches_dense_masked_attention(has_bias: bool) -> None:
    packed = pack([sample.token_ids for sample in make_tree_samples()])
    torch.manual_seed(0)
    query, grad = torch.randn(2, 1, 6, len(packed), 8)
    key, value = torch.randn(2, 1, 2, len(packed), 8)
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    mask = torch.from_numpy(make_visibility(packed))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    plan = make_attention_plan(packed, "cpu", torch.float32)
    if has_bias:  # as on a GPU
        plan = TreeAttentionPlan([], [], make_tree_bias(packed, "cpu", torch.float32))
    output, _ = tree_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3, tree_plan=plan)
    actual_grads = torch.autograd.grad(output.transpose(1, 2), (query, key, value), grad)
    assert plan.calls == 1
    for a, b in zip((output.transpose(1, 2), *actual_grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_plan_for_a_gpu_has_one_mask_unless_the_row_is_too_long() -> None:
    longest, too_long = (pack([np.zeros(MAX_BIAS_TOKENS + n, np.int32)]) for n in (0, 1))
    assert make_attention_plan(longest, "meta", torch.bfloat16).bias is not None
    assert make_attention_plan(too_long, "meta", torch.bfloat16).bias is None
    assert make_attention_plan(longest, "cpu", torch.bfloat16).bias is None


@pytest.mark.parametrize("causal", [False, True])
def test_math_kernel_matches_flash_kernel(causal: bool) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 2, 7, 8)
    flash = attention.block_forward(q, k, v, is_causal=causal, scale=0.4)
    for a, b in zip(attention.math_forward(q, k, v, causal, 0.4), flash, strict=True):
        torch.testing.assert_close(a, b)
    grad = torch.randn(2, 4, 7, 8)
    expected_grads = attention.cpu_flash_backward(grad, q, k, v, *flash, causal, 0.4)
    for a, b in zip(attention.math_backward(grad, q, k, v, *flash, causal, 0.4), expected_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_tree_attention_rejects_unsupported_arguments() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(BackendError, match="softcap"):
        tree_attention(torch.nn.Identity(), x, x, x, None, softcap=30.0)
    with pytest.raises(BackendError, match="keyword"):
        tree_attention(torch.nn.Identity(), x, x, x, None)


def test_attention_plan_computes_a_shared_prefix_in_one_cross_block() -> None:
    prefix = np.arange(100, dtype=np.int32)
    packed = pack([np.concatenate([prefix, np.array([200 + i] * 20, np.int32)]) for i in range(16)])
    plan = make_attention_plan(packed, "cpu", torch.float32)
    assert len(plan.cross) == 1
    assert len(plan.own) == 2
