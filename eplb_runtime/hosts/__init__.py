"""One file per framework: what its MoE layers look like, where its experts are, how to get between the two.

``attach`` finds the host for a model. Nothing outside this room knows a framework.
"""

from .entry import AttachError, attach

__all__ = ["AttachError", "attach"]
