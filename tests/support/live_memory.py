"""How much memory tensors take beyond what was there: counted at each operation, to the byte."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside, every storage that an operation makes counts until nobody holds it any more: ``live`` bytes
    now, and ``peak``, the most that it ever was."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._grow(storage.nbytes())
                weakref.finalize(storage, self._grow, -storage.nbytes())
        return result

    def _grow(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (Tensor, torch.nn.Parameter) and not leaf.is_meta]
