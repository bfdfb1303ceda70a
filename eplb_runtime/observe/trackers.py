"""A run's numbers in a tracker of experiments: TensorBoard, Weights & Biases, MLflow, each in its own terms.

A tracker is a function that takes a step and numbers by name; `track` calls it after each decision, on the observer's
thread. The libraries are the user's: nothing here imports them before they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

Tracker = Callable[[int, Mapping[str, float]], None]
"""Called with the step and ``{"imbalance/measured/mean": 1.2, ...}``."""


def track(balancer: Balancer, tracker: Tracker) -> None:
    """Call a tracker with step and numbers of each decision from now on. On other ranks than the first nothing is done.

    ::

        track(balancer, tensorboard(SummaryWriter("runs/first")))

    Args:
        tracker: what `tensorboard`, `wandb` or `mlflow` below return, or a function of your own. It is called on a
            thread of its own; one that raises is warned of and called again.
    """
    if balancer.shown is not None:
        balancer.shown.track(tracker)


def tensorboard(writer: Any, prefix: str = "eplb/") -> Tracker:
    """Return a tracker that adds each number as a scalar, ``prefix`` before its name, at the balancer's step.
    ``writer``: a ``torch.utils.tensorboard.SummaryWriter``."""

    def log(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(prefix + name, value, global_step=step)

    return log


def wandb(run: Any, prefix: str = "eplb/") -> Tracker:
    """Return a tracker that logs numbers to a run of ``wandb.init()``, ``prefix`` before their names. Defines, in the
    run, the metric ``eplb/step`` (with the default prefix) as the axis of these numbers."""
    axis = prefix + "step"
    run.define_metric(axis, hidden=True)
    run.define_metric(prefix + "*", step_metric=axis)
    return lambda step, scalars: run.log({axis: step, **{prefix + name: value for name, value in scalars.items()}})


def mlflow(run_id: str, client: Any = None, prefix: str = "eplb/") -> Tracker:
    """Return a tracker that logs numbers to an MLflow run by its id (``mlflow.active_run().info.run_id``): the active
    run is another in each thread. ``client``: an ``mlflow.MlflowClient``; None: one is made."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = client or MlflowClient()

    def log(step: int, scalars: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run_id, metrics=[Metric(prefix + name, value, now, step) for name, value in scalars.items()])

    return log
