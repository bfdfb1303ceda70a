"""One file per framework: what its MoE layers look like, where its experts are, how to get between the two.

``attach`` finds the host for a model. Nothing outside this room knows a framework.
"""

from .description import AttachError
from .entry import attach
from .sharding import shard_experts

__all__ = ["AttachError", "attach", "shard_experts"]
