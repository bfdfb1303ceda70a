"""Exports of an attached model, for `Balancer`: streams of its weights, and comparisons with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..utils.errors import one_line
from .export_check import ExportCheck
from .logical_tensors import ExportError, LogicalTensorList, LogicalTensors, StreamOptions
from .weights import Weight

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

Weights = Callable[[], Sequence[Weight]]


class Exporter:
    """The exports of one balancer. Both methods are collective, between steps.

    Args:
        weights_of_stages: lists the tensors of each pipeline stage of this rank, as they are now.
    """

    def __init__(self, balancer: Balancer, weights_of_stages: Mapping[int, Weights]) -> None:
        self._balancer = balancer
        self._weights_of_stages = weights_of_stages

    def stream(self, bucket_bytes: int, dtype: torch.dtype | None, rank: int | None, seconds: float) -> LogicalTensors:
        """`Balancer.named_logical_tensors`."""
        options = StreamOptions(bucket_bytes, dtype, rank, seconds)
        ranks = self._balancer._runtime.job.ranks
        problem = ""
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            problem = f"bucket_bytes is {bucket_bytes!r}: give a whole number of bytes from 1 on"
        if rank is not None and rank not in ranks:
            problem = f"rank is {rank!r}: give a rank of the job ({ranks[0]} to {ranks[-1]}), or None for all"
        return LogicalTensors(self._balancer, self._listed(dtype, repr(options), problem), options)

    def verify(self, tensors: object, dtype: torch.dtype | None, seconds: float) -> str:
        """`Balancer.verify_export`."""
        options = f"{dtype}{', a stream' if isinstance(tensors, LogicalTensors) else ''}"
        return ExportCheck(self._balancer, self._listed(dtype, options, ""), seconds).compare(tensors)

    def _listed(self, dtype: torch.dtype | None, options: str, problem: str) -> LogicalTensorList:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            problem, dtype = f"dtype is {dtype!r}: give one of floating point, or None", None
        weights: dict[int, Sequence[Weight]] = {}
        try:
            problem = problem or self._balancer._why_freed()  # first: a list of empty weights may fail in other words
            weights = {stage: listed() for stage, listed in self._weights_of_stages.items()}
        except Exception as error:
            problem = problem or one_line(error, with_type=True)
        tensors = LogicalTensorList(self._balancer, weights, dtype)
        if found := self._balancer._rebalancer.run(lambda: tensors.agree(options, problem)):
            raise ExportError(f"weights cannot be exported: {found}")
        return tensors
