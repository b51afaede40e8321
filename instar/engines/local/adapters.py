"""Install the adapters that a step uses in a model's linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instar.engines.local.lora import EngineLinear, LoraPair, RowMasks

NO_ADAPTER = -1


@dataclass(eq=False, frozen=True, slots=True)
class Adapter:
    """The LoRA updates of a policy by module name. The base model has none."""

    pairs: dict[str, LoraPair]

    @property
    def rank(self) -> int:
        return next((len(pair.down) for pair in self.pairs.values()), 0)


class AdapterLayers:
    """Selects the adapters of the linear layers before each step. If the tokens of a step use different
    adapters, the matrices of all of them are stacked to one pair per layer, and each token is multiplied only
    with its own rows. This needs no more kernel calls than one adapter. The stacked copies are kept until
    they lack an adapter or contain one that was unloaded."""

    def __init__(self, model: nn.Module, output_layer: nn.Module | None = None) -> None:
        modules = model.named_modules()
        self._layers = {name: module for name, module in modules if isinstance(module, EngineLinear)}
        self._token_masks, self._output_masks = RowMasks(), RowMasks()
        for layer in self._layers.values():
            layer.masks = self._output_masks if layer is output_layer else self._token_masks
        self._installed: tuple[Adapter | _Stack, ...] = ()
        self._stack: _Stack | None = None

    @property
    def can_mix(self) -> bool:
        """False if a layer computes only some of the tokens, so that it does not know their adapters."""
        return not any(".experts." in name for name in self._layers)

    def select(
        self, spans: Sequence[tuple[Adapter, int]], logit_indices_N: Tensor, token_count: int, *, stacks: bool
    ) -> None:
        """Use each span's adapter for its number of tokens. Further tokens, up to ``token_count``, may use
        any. The output layer computes only the tokens ``logit_indices_N``. If ``stacks`` is False, the
        adapters are applied one after the other, so that a result does not depend on the other adapters."""
        adapters = [*dict.fromkeys(adapter for adapter, _ in spans)]
        if len(adapters) == 1:
            self._install((adapters[0],))
            self._token_masks.values = self._output_masks.values = ()
            return
        indices = [index for adapter, count in spans for index in [adapters.index(adapter)] * count]
        indices += [0] * (token_count - len(indices))
        indices_T = torch.tensor(indices, device=logit_indices_N.device)
        if stacks:
            stack = self._get_stack([adapter for adapter in adapters if adapter.pairs])
            self._install((stack,))
            self._token_masks.values = [stack.hide_columns(adapters, indices_T)]
        else:
            self._install(adapters)
            self._token_masks.values = [(indices_T != index)[:, None] for index in range(len(adapters))]
        self._output_masks.values = [mask[logit_indices_N] for mask in self._token_masks.values]

    def forget(self, adapter: Adapter) -> None:
        """Free the memory of an adapter that was unloaded."""
        if self._stack is not None and adapter in self._stack.adapters:
            self._drop_stack()
        elif adapter in self._installed:
            self._install(())

    def _get_stack(self, adapters: Sequence[Adapter]) -> _Stack:
        """Return a stack that contains the adapters, and possibly others."""
        if self._stack is None or not set(adapters) <= set(self._stack.adapters):
            others = [] if self._stack is None else [a for a in self._stack.adapters if a not in adapters]
            self._drop_stack()
            self._stack = _Stack([*others, *adapters])
        return self._stack

    def _drop_stack(self) -> None:
        self._stack = None
        self._install(())

    def _install(self, sources: Sequence[Adapter | _Stack]) -> None:
        if tuple(sources) == self._installed:
            return
        self._installed = tuple(sources)
        for name, layer in self._layers.items():
            pairs = tuple(source.pairs.get(name) for source in sources)
            layer.pairs = pairs if any(pairs) else ()


class _Stack:
    """The stacked matrices of several adapters."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = adapters
        names = dict.fromkeys(name for adapter in adapters for name in adapter.pairs)
        self.pairs = {name: _stack_pairs([(a.pairs.get(name), a.rank) for a in adapters]) for name in names}
        self._adapter_of_column = [i for i, adapter in enumerate(adapters) for _ in range(adapter.rank)]

    def hide_columns(self, adapters: Sequence[Adapter], adapter_indices_T: Tensor) -> Tensor:
        """Return a mask [T, sum of the ranks] that is False only for the columns of each token's adapter,
        which is ``adapters[adapter_indices_T[t]]``."""
        positions = [self.adapters.index(a) if a.pairs else NO_ADAPTER for a in adapters]
        device = adapter_indices_T.device
        columns_R = torch.tensor(self._adapter_of_column, device=device)
        return torch.tensor(positions, device=device)[adapter_indices_T][:, None] != columns_R


def _stack_pairs(pairs: Sequence[tuple[LoraPair | None, int]]) -> LoraPair:
    """Stack the pairs of one layer. An adapter without an update of this layer gets zeros of its rank."""
    example = next(pair for pair, _ in pairs if pair is not None)
    downs = [example.down.new_zeros(r, example.down.shape[1]) if p is None else p.down for p, r in pairs]
    ups = [example.up.new_zeros(r, example.up.shape[1]) if p is None else p.up for p, r in pairs]
    return LoraPair(torch.cat(downs), torch.cat(ups))
