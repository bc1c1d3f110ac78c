"""A module that holds a layout, which moves with the module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layout import BlockSparseLayout


class LayoutModule(nn.Module):
    """Holds a layout for a module, as a non-persistent buffer holds a tensor.

    ``.to()``, ``.cuda()`` and ``.cpu()`` of any module around it move the layout; a change of dtype
    does not change it. ``state_dict`` does not contain the layout: make it again, or use its
    ``save`` and ``load``.

    Example::

        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = LayoutModule(patterns.sliding_window(4096, 8))

            def forward(self, q, k, v):
                return blocksparse_attn_func(q, k, v, self.blocks.layout, causal=True)

    Args:
        layout: the layout.

    Attributes:
        layout: the layout, on the device of the module.

    Raises:
        TypeError: if ``layout`` is not a ``BlockSparseLayout``.
    """

    def __init__(self, layout: BlockSparseLayout) -> None:
        super().__init__()
        if not isinstance(layout, BlockSparseLayout):
            raise TypeError(f"layout must be a BlockSparseLayout, got {type(layout).__name__}")
        self.layout = layout

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayoutModule:
        # move the layout to the device to which ``fn`` moves an int32 tensor
        index = torch.empty(0, dtype=torch.int32, device=self.layout.device)
        self.layout = self.layout.to(fn(index).device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Describe the layout when the module is printed."""
        return repr(self.layout)
