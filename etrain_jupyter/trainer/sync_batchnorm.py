"""BatchNorm over the samples of all ranks, for ``sync_batchnorm``.

``torch.nn.SyncBatchNorm`` requires GPUs and gives every rank the same weight in the backward pass.
Here, ranks may have different numbers of samples, including none. Pass ``k`` of all ranks together
is one batch, so the result equals ``torch.nn.BatchNorm`` over the concatenated batch::

    forward    each rank: count, sum and sum of squares per channel ── exchange ── mean, variance
    backward   each rank: two sums of the output's gradient per channel ── exchange ── gradient

Both exchanges block. All ranks therefore need the same layers in the same order, and the same
number of passes; a rank without samples for a pass borrows samples, which do not count.

Shape: ``C`` channels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from etrain_jupyter.trainer.group.small_sum import Peers
from etrain_jupyter.trainer.references import WorkloadError

TAG = 1 << 20
"""Message tag; no other exchange of a rank uses it."""


class Waitable(Protocol):
    """An exchange in progress."""

    def wait(self) -> None:
        """Block until complete. Raises CommunicationError if a peer is lost."""
        ...


class StartingPeers(Peers, Protocol):
    """The ranks of a generation; see ``group.process_group.RankGroup``."""

    def start(self, work: Any) -> Waitable:
        """Run ``work`` in the exchange thread."""
        ...


class Watch(Protocol):
    """Measures the parts of a step; see ``times.Stopwatch``."""

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """Measure an exchange."""
        ...


class NoWatch:
    """Measures nothing."""

    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()


NO_WATCH: Watch = NoWatch()


class SyncedNorms:
    """The BatchNorm layers of a model; outside ``over``, each rank uses its own samples.

    Raises:
        WorkloadError: If the model has no BatchNorm layer, or one with a ``forward`` of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.counts = True
        """False while a pass uses borrowed samples. They are normalized with the same statistics,
        but do not contribute to them."""
        self._peers: StartingPeers | None = None
        self._watch: Watch = NO_WATCH
        layers = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
        if not layers:
            raise WorkloadError(
                f"sync_batchnorm: true, but the model, a {type(model).__name__}, has no BatchNorm "
                "layer. Remove the line."
            )
        self._layers = layers
        self._size = 0
        """Maximum size of a message; a lazy layer knows its channels only after the warm-up."""
        for number, (name, layer) in enumerate(layers.items()):
            if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise WorkloadError(
                    f"sync_batchnorm: true cannot synchronize layer {name!r}: "
                    f"{type(layer).__name__} has a forward of its own. Replace it with torch's "
                    "BatchNorm, or remove the line."
                )
            # Set an attribute of the layer instead of replacing the layer, because the notebook's
            # code and the model may refer to the layer itself.
            layer.forward = functools.partial(_forward, self, number, layer)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The notebook may copy its model in the middle of a step, but sockets cannot be copied.
        return self

    def is_active(self, layer: nn.Module) -> bool:
        """Return True if ``layer`` must use the statistics of all ranks."""
        return self._peers is not None and layer.training

    @contextlib.contextmanager
    def over(self, peers: StartingPeers, watch: Watch = NO_WATCH) -> Iterator[None]:
        """Synchronize the layers over these ranks within the context.

        Args:
            peers: The ranks.
            watch: Measures the time in the exchanges.
        """
        self._watch = watch
        if peers.world_size > 1:
            self._peers = peers
        self.counts = True
        # A label, a count, and two values per channel.
        self._size = 2 + 2 * max(layer.num_features for layer in self._layers.values())
        try:
            yield
        finally:
            self._peers, self.counts = None, True

    def sum(self, number: int, values: torch.Tensor, *, is_backward: bool) -> torch.Tensor:
        """Return the sum of a float64 vector over the ranks, on the device of ``values``.

        Args:
            number: Number of the layer.
            values: This rank's share, which counts only if ``counts`` is set.
            is_backward: False in the forward pass.

        Raises:
            CommunicationError: A peer is lost.
            WorkloadError: Another rank is in another layer.
        """
        # Use messages between pairs instead of a collective, because collectives must start in the
        # same order on all ranks, and DDP starts its own in the backward pass. Every rank adds up
        # all values in the order of the ranks, so all ranks have the same bits.
        peers = self._peers
        assert peers is not None
        label = float(2 * number + is_backward)
        own = torch.cat([torch.tensor([label], dtype=torch.float64), values.cpu()])
        others = [rank for rank in range(peers.world_size) if rank != peers.rank]
        # A rank in another layer sends a different number of values, which must be received, too.
        found = {rank: torch.zeros(self._size, dtype=torch.float64) for rank in others}

        def exchange() -> None:
            works = [peers.irecv(found[rank], rank, TAG) for rank in others]
            works += [peers.isend(own, rank, TAG) for rank in others]
            for work in works:
                work.wait()

        with self._watch.exchanging():
            peers.start(exchange).wait()
        found[peers.rank] = own
        total = torch.zeros(values.numel(), dtype=torch.float64)
        for rank, message in sorted(found.items()):
            if message[0] != label:
                raise WorkloadError(
                    f"sync_batchnorm: rank {peers.rank} computes {self._describe(label)} while "
                    f"rank {rank} computes {self._describe(float(message[0]))}. All workers must "
                    "compute the same BatchNorm layers in the same order. Change the model, or "
                    "write sync_batchnorm: false."
                )
            total += message[1 : 1 + values.numel()]
        return total.to(values.device)

    def _describe(self, label: float) -> str:
        number, is_backward = divmod(int(label), 2)
        return (
            f"the {'backward' if is_backward else 'forward'} pass of {list(self._layers)[number]!r}"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(norms: SyncedNorms, number: int, layer: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Replace ``forward`` of a BatchNorm layer."""
    if not norms.is_active(layer):
        return _BatchNorm.forward(layer, x)
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    y, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, layer.running_mean, layer.eps, norms, number
    )
    factor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # a plain average
            factor = 1.0 / float(layer.num_batches_tracked)
    if layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
                running.copy_((1 - factor) * running.double() + factor * new)
    return y  # type: ignore[no-any-return]


class _Normalize(torch.autograd.Function):
    """Normalize with the mean and the variance of all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        eps: float,
        norms: SyncedNorms,
        number: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output, and mean, variance and count of all ranks, the last three float64."""
        values = _at_least_float(x)
        # Sums of squares lose precision unless they are taken around a point near the mean. All
        # ranks have the same running mean.
        num_channels = x.shape[1]
        zeros_C = torch.zeros(num_channels, dtype=torch.float64, device=x.device)
        around_C = zeros_C if running_mean is None else running_mean.double()
        share = (
            _share_of(values, around_C)
            if norms.counts
            else zeros_C.new_zeros(2 * zeros_C.numel() + 1)
        )
        total = norms.sum(number, share, is_backward=False)
        count = total[:1]
        if float(count) <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, but all workers together "
                f"have {int(count)} in a pass; this one has an input of size {tuple(x.shape)}"
            )
        shift_C, squares_C = (total[1:] / count).chunk(2)
        mean_C, variance_C = around_C + shift_C, (squares_C - shift_C.square()).clamp_min(0)
        dtype = values.dtype
        mean, variance = mean_C.to(dtype), variance_C.to(dtype)
        w, b = (p if p is None else p.detach().to(dtype) for p in (weight, bias))
        y = F.batch_norm(x, mean, variance, w, b, False, 0.0, eps)
        ctx.save_for_backward(x, w, mean, (variance_C + eps).rsqrt().to(dtype), count)
        ctx.norms, ctx.number, ctx.counts = norms, number, norms.counts
        ctx.dtypes = [p if p is None else p.dtype for p in (weight, bias)]
        ctx.mark_non_differentiable(mean_C, variance_C, count)
        return y, mean_C, variance_C, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; for weight and bias, they are sums over this rank's samples."""
        x, weight, mean_C, inverse_C, count = ctx.saved_tensors
        shape, dims = _shape_and_dims(x)
        dy_own = _at_least_float(dy)
        normalized = (_at_least_float(x) - mean_C.view(shape)) * inverse_C.view(shape)
        sums_C = dy_own.sum(dims), (dy_own * normalized).sum(dims)
        dx = None
        if ctx.needs_input_grad[0]:
            share = torch.cat(sums_C).double()
            if not ctx.counts:
                share.zero_()
            total = ctx.norms.sum(ctx.number, share, is_backward=True) / count
            mean_dy_C, slope_C = (part.to(mean_C.dtype) for part in total.chunk(2))
            scale_C = inverse_C if weight is None else inverse_C * weight
            centered = dy_own - mean_dy_C.view(shape) - normalized * slope_C.view(shape)
            dx = (centered * scale_C.view(shape)).to(x.dtype)
            # The gradients of the other ranks' losses also reach borrowed samples.
            if not ctx.counts:
                dx.zero_()
        kinds = zip(ctx.dtypes, (sums_C[1], sums_C[0]), strict=True)
        d_weight, d_bias = (None if dtype is None else value.to(dtype) for dtype, value in kinds)
        return dx, d_weight, d_bias, None, None, None, None


def _share_of(values: torch.Tensor, around_C: torch.Tensor) -> torch.Tensor:
    """Return count, sums and sums of squares around a point, float64, shape ``(1 + 2 * C,)``."""
    _, dims = _shape_and_dims(values)
    size = values.numel() // max(1, values.shape[1])
    if not size:
        return around_C.new_zeros(1 + 2 * around_C.numel())
    variance_C, mean_C = torch.var_mean(values, dims, correction=0)
    distance_C = mean_C.double() - around_C
    squares_C = variance_C.double() + distance_C.square()
    return torch.cat([around_C.new_full((1,), size), size * distance_C, size * squares_C])


def _at_least_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _shape_and_dims(x: torch.Tensor) -> tuple[list[int], list[int]]:
    dims = [dim for dim in range(x.ndim) if dim != 1]
    return [1, -1] + [1] * (x.ndim - 2), dims
