"""The metrics of a run as Prometheus scrapes them, by its own client library (the extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .metrics import Metric

NOT_INSTALLED = "prometheus_client is not installed on rank 0: pip install 'eplb-runtime[metrics]'"


class MetricsCollector:
    """What a registry of prometheus_client collects: a job that has a registry of its own registers one of these.

    Args:
        read: the metrics as they stand; called at each scrape.
    """

    def __init__(self, read: Callable[[], Sequence[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in self._read():
            family: Any = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=list(metric.samples[0][0]) if metric.samples else []
            )
            for labels, value in metric.samples:
                family.add_metric(list(labels.values()), value)
            yield family


def exposition(read: Callable[[], Sequence[Metric]], accept: str) -> tuple[bytes, str]:
    """The text that Prometheus reads, and its content type.

    Args:
        accept: the header of the request.

    Raises:
        ImportError: prometheus_client is missing.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(MetricsCollector(read))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
