"""Context parallelism: each rank of a group computes a piece of the sequence, and gathers keys and values to attend.

A block computes with pieces of its inputs and whole parameters. Calls of torch's ``scaled_dot_product_attention`` and
of ``nn.MultiheadAttention`` are recognised as attention; everything else must treat each position by itself. The proof
refuses blocks that do not. Outside of blocks, and without gradients, each rank computes everything.

Source: https://arxiv.org/abs/2407.21783 (3.3.2, context parallelism by all-gather)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from distwrap._internals.torch_sharding import own_parameters
from distwrap._internals.torch_tree import map_tensors, tensors_in
from distwrap.errors import ModelError
from distwrap.group.world import say_once
from distwrap.strategies.fsdp.attention import attend, why_not
from distwrap.strategies.fsdp.pieces import Pieces
from distwrap.strategies.fsdp.plans import Cuts, blocks_of
from distwrap.strategies.fsdp.styles import Running, Whole, cut_along, enter, put_together
from distwrap.strategies.fsdp.tensor_parallel import TensorParallel, general, kind_of, statistics_of


class ContextParallel(TensorParallel):
    """Model whose blocks compute pieces of sequences; its ``repr`` is a table of them.

    Args:
        net: the user's whole model, which is changed in place.
        mesh: the mesh of the group.
    """

    def __init__(self, net: nn.Module, mesh: DeviceMesh) -> None:
        self._proven: dict[str, set[tuple[bool, ...]]] = {}  # by kind of block: which of its attentions gather keys
        self._axes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by block: the dimension of sequences
        super().__init__(net, mesh, "auto", by_sequence=True, shares=1)
        self.running.sums = False

    @property
    def compiles(self) -> bool:
        """Always false, as torch.compile cannot trace the mode that recognises attention."""
        return False

    def _found(self) -> dict[str, Cuts]:
        blocks, units = blocks_of(self._net), list[str]()
        for name, module in self._net.named_modules():
            if id(module) in blocks and not any(name.startswith(f"{outer}.") for outer in units):
                units.append(name)
        if not units:
            self._reasons["the model"] = "it has no list of alike blocks"
        return {name: Cuts(by_sequence=True) for name in units}

    def _cut(self, module: nn.Module, cuts: Cuts, undo: list[Callable[[], object]]) -> None:
        if not cuts.by_sequence:
            super()._cut(module, cuts, undo)
            return
        if why := statistics_of(module):
            raise ModelError(
                f"context_parallel=: {type(module).__name__} {why}. Use a norm over each word, as nn.LayerNorm."
            )
        ways = self._proven.setdefault(kind_of(module), set())
        self._axes[module] = _axis(module)
        for part in module.modules():
            own = [value for value in own_parameters(part).values() if value is not None]
            if not own or all(isinstance(value, DTensor) for value in own):
                continue
            is_attention = isinstance(part, nn.MultiheadAttention) and not why_not(part, 1)
            style = _Attention(self.running) if is_attention else Whole(self.running, sums=True)
            parallelize_module(part, self._mesh, style)
        undo.append(module.register_forward_pre_hook(self._divide, with_kwargs=True).remove)
        join = partial(self._join, ways=ways, proves=undo is not self._undo)
        undo.append(module.register_forward_hook(join, always_call=True).remove)

    def _says(self, name: str) -> str:
        return (
            "Under context_parallel= a block may mix the words of a sequence only by "
            "scaled_dot_product_attention or nn.MultiheadAttention, and must get positions and masks as "
            f"arguments, whose length is not that of another dimension too. Change {general(name)!r}, or "
            "use strategy='fsdp'."
        )

    def _case(self, block: nn.Module, args: Any, kwargs: Any) -> Hashable:
        """Return which dimensions of a block's inputs are as long as the sequence or a piece; ``None``: no pieces."""
        if not torch.is_grad_enabled():
            return None
        tensors = tensors_in((args, kwargs))
        length = self._length(block, tensors)
        if length is None:
            return None
        piece = length // self._mesh.size()
        return tuple(tuple((size == length) + 2 * (size == piece) for size in tensor.shape) for tensor in tensors)

    def _length(self, block: nn.Module, tensors: list[torch.Tensor]) -> int | None:
        """Return the length of the sequence in a block's inputs."""
        kind, ranks = type(block).__name__, self._mesh.size()
        x = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 2), None)
        if x is None:
            alone = (
                f"context_parallel={ranks}: {kind} gets no sequences, so that each rank computes all of it. "
                "Leave context_parallel out."
            )
            say_once(f"no sequence {kind}", alone)
            return None
        length = x.shape[self._axes[block]]
        if length % ranks:
            raise ModelError(
                f"context_parallel={ranks}: {kind} got a tensor of shape {tuple(x.shape)}, whose sequence of "
                f"{length} words cannot be divided over {ranks} ranks. Pad the sequences; without gradients "
                "any length works."
            )
        return length

    def _divide(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        length = self._length(block, tensors_in((args, kwargs))) if torch.is_grad_enabled() else None
        pieces = None
        if length is not None:
            draws = block.training
            pieces = SequencePieces(self.running, self._mesh, axis=self._axes[block], whole=length, draws=draws)
            args, kwargs = map_tensors(pieces.divided, (args, kwargs))
        self._enter(pieces)
        return args, kwargs

    def _join(self, block: nn.Module, args: Any, output: Any, *, ways: set[tuple[bool, ...]], proves: bool) -> Any:
        pieces = self._inside[-1] if self._inside else None
        self._end(block, args, output)
        if output is None or not isinstance(pieces, SequencePieces):  # not in pieces, or after an exception
            return output
        way = tuple(pieces.gathers)
        if proves:
            ways.add(way)
        elif way and ways and way not in ways:
            raise ModelError(
                f"context_parallel={self._mesh.size()}: {type(block).__name__} attends within parts of "
                f"{pieces.length} words, which is also the length of a rank's piece, so that the two cannot be "
                "told apart. Pad the sequences to another length."
            )
        return map_tensors(pieces.joined, output)


class SequencePieces(Pieces):
    """Forward of a block with a piece of the sequence on each rank.

    Args:
        running: the running forwards of the model.
        mesh: the mesh of the group.
        axis: the dimension of the block's inputs that is cut.
        whole: the length of the whole sequence.
        draws: whether dropout is on.

    Attributes:
        gathers: for each attention, whether its keys were gathered.
    """

    def __init__(self, running: Running, mesh: DeviceMesh, *, axis: int, whole: int, draws: bool) -> None:
        super().__init__(running, mesh, length=whole // mesh.size(), draws=draws)
        self._axis, self._whole = axis, whole
        self._first: torch.Size | None = None
        self.gathers: list[bool] = []

    def divided(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of an input, if exactly one dimension has the length of the sequence."""
        if self._first is None and tensor.is_floating_point() and tensor.dim() > 2:
            self._first = tensor.shape
        axis = self._axis_of(tensor)
        if not tensor.requires_grad:
            return tensor if axis is None else tensor.narrow(axis, self._start, self.length).clone()
        if axis is None:
            return enter(tensor, self.mesh)
        return cut_along(tensor, self.mesh, axis)

    def _axis_of(self, tensor: torch.Tensor) -> int | None:
        if tensor.shape == self._first:
            return self._axis
        return self._only_axis(tensor, self._whole)

    def _only_axis(self, tensor: torch.Tensor, length: int) -> int | None:
        axes = {axis for axis, size in enumerate(tensor.shape) if size == length}
        if self._first is not None and tensor.dim() > 2 and self._first[1 - self._axis] == length:
            axes.discard(1 - self._axis)  # the batch is as long as the sequence
        return axes.pop() if len(axes) == 1 else None

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of the ranks' pieces; a tensor that is not a piece stays as it is."""
        assert self._first is not None
        same = tensor.dim() == len(self._first) and tensor.shape[self._axis] == self.length
        axis = self._axis if same else self._only_axis(tensor, self.length)
        return tensor if axis is None else put_together(tensor, self.mesh, axis)

    def keys(self, query: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return keys or values of the whole sequence, if a piece of it attends to itself."""
        if not query.shape[-2] == tensor.shape[-2] == self.length:
            return tensor
        return enter(tensor, self.mesh, Shard(tensor.dim() - 2))

    def rows(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return a mask for the queries of this rank and all keys."""
        if mask is not None and mask.shape[-1] == self.length:
            mask = enter(mask, self.mesh, Shard(mask.dim() - 1))
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == self._whole:
            mask = mask.narrow(-2, self._start, self.length)
        return mask

    @property
    def _start(self) -> int:
        return self.length * self.mesh.get_local_rank()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attended(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        self.gathers.append(query.shape[-2] == key.shape[-2] == self.length)
        if query.shape[-2] == self.length:
            key, value = self.keys(query, key), self.keys(query, value)
            attn_mask = self.rows(attn_mask)
            if is_causal and attn_mask is None:
                like = query.dtype, query.device
                attn_mask, is_causal = _causal(self.length, key.shape[-2], self._start, *like), False
        attend = F.scaled_dot_product_attention
        if not dropout_p:
            return attend(query, key, value, attn_mask, 0.0, is_causal, **options)
        found: torch.Tensor = self.apart(attend, query, key, value, attn_mask, dropout_p, is_causal, **options)
        return found


class _Attention(Whole):
    """Style of an ``nn.MultiheadAttention`` of which each rank computes a piece of the sequence."""

    def __init__(self, running: Running) -> None:
        super().__init__(running, sums=True)

    def forward(self, mesh: DeviceMesh) -> Callable[..., Any]:
        def run(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            inside = self.running.inside
            pieces = inside if isinstance(inside, SequencePieces) else None
            return attend(module, None, query, key, value, *args, pieces=pieces, **kwargs)

        return run


@lru_cache(maxsize=2)
def _causal(queries: int, keys: int, first: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a causal mask to add to the scores of queries that start at position `first` of the sequence."""
    later = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(first + 1)
    return torch.zeros(queries, keys, dtype=dtype, device=device).masked_fill(later, float("-inf"))


def _axis(block: nn.Module) -> int:
    """Return the dimension of sequences: 0 for torch's attention with ``batch_first=False``, else 1."""
    attentions = [part for part in block.modules() if isinstance(part, nn.MultiheadAttention)]
    return 0 if attentions and not any(part.batch_first for part in attentions) else 1
