"""torchtitan 0.3.0: its own Trainer, with the routed experts of its models balanced.

    import eplb_runtime as eplb
    from eplb_runtime.hosts.torchtitan import balance
    ...
    balance(config, eplb.BalancerConfig(interval=50))

Nothing else of a training changes. This folder's README says what is exact, is refused, and ran. `settings.py` runs
without torchtitan.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attach import balance

__all__ = ["balance"]


def __getattr__(name: str) -> Any:
    if name != "balance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .attach import balance

    return balance
