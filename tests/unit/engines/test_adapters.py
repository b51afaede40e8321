"""Tests for linear layers whose rows use different adapters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from instar.engines.local.adapters import Adapter, AdapterLayers
from instar.engines.local.lora import LoraPair, replace_linears

WIDTHS = (48, 64, 32)
LOGIT_INDICES = [1, 4, 5]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))
    replace_linears(model)
    return model.requires_grad_(False)


def make_adapter(rank: int, *names: str) -> Adapter:
    sizes = {name: (WIDTHS[int(name)], WIDTHS[int(name) + 1]) for name in names}
    return Adapter({n: LoraPair(torch.randn(rank, a), torch.randn(rank, b)) for n, (a, b) in sizes.items()})


def forward(model: nn.Sequential, x: Tensor) -> Tensor:
    """Return the output of the last layer for the rows LOGIT_INDICES."""
    hidden: Tensor = model[0](x)
    return model[1](hidden[:, LOGIT_INDICES])


def forward_mixed(
    layers: AdapterLayers, model: nn.Sequential, x: Tensor, spans: list[tuple[Adapter, int]], *, stacks: bool
) -> Tensor:
    layers.select(spans, torch.tensor(LOGIT_INDICES), x.shape[1], stacks=stacks)
    return forward(model, x)


@pytest.mark.parametrize("stacks", [True, False])
def test_rows_with_different_adapters_match_each_adapter_alone(model: nn.Sequential, stacks: bool) -> None:
    """The adapters have different ranks and layers, one is empty, and each batch needs other adapters."""
    layers = AdapterLayers(model, model[1])
    adapters = [make_adapter(4, "0", "1"), make_adapter(6, "1"), make_adapter(2, "0"), Adapter({})]
    x = torch.randn(1, 7, WIDTHS[0])
    for order in ([0, 1, 0, 3, 1, 1], [0, 3, 3, 3, 3, 0], [2, 2, 2, 1, 1, 3], [1] * 6, [2, 0, 1, 3, 2, 1]):
        spans = [(adapters[index], 1) for index in order]
        mixed = forward_mixed(layers, model, x, spans, stacks=stacks)
        for row, token in enumerate(LOGIT_INDICES):
            alone = forward_mixed(layers, model, x, [(adapters[order[token]], 7)], stacks=stacks)
            torch.testing.assert_close(mixed[:, row], alone[:, row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stacks", [True, False])
def test_infinite_product_of_one_adapter_does_not_change_other_rows(
    model: nn.Sequential, stacks: bool
) -> None:
    layers = AdapterLayers(model, model[1])
    healthy, overflowing = make_adapter(4, "0", "1"), make_adapter(4, "0", "1")
    for pair in overflowing.pairs.values():
        pair.down.fill_(1e38)
    x = torch.rand(1, 6, WIDTHS[0]) + 1
    spans = [(healthy, 5), (overflowing, 1)]
    mixed = forward_mixed(layers, model, x, spans, stacks=stacks)
    alone = forward_mixed(layers, model, x, [(healthy, 6)], stacks=stacks)
    torch.testing.assert_close(mixed[:, :2], alone[:, :2], rtol=1e-5, atol=1e-5)
    assert not mixed[:, 2].isfinite().all()


def test_forgotten_adapter_is_not_kept_in_memory(model: nn.Sequential) -> None:
    layers = AdapterLayers(model, model[1])
    first, second = make_adapter(4, "0"), make_adapter(4, "0")
    x = torch.randn(1, 6, WIDTHS[0])
    base = forward(model, x)
    forward_mixed(layers, model, x, [(first, 3), (second, 3)], stacks=True)
    layers.forget(second)
    assert torch.equal(forward(model, x), base)
    forward_mixed(layers, model, x, [(first, 6)], stacks=True)
    layers.forget(first)
    assert torch.equal(forward(model, x), base)
