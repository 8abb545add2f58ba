"""The untrusted program: it multiplies shares with public weights, and knows nothing else.

This room imports ops and wire and never a trusted room, so it installs and runs alone.
"""

from darknight.worker.executor import Executor
from darknight.worker.serve import serve

__all__ = ["Executor", "serve"]
