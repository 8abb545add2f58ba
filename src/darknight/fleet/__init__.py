"""The enclave's view of its workers: who they are, sending work, waiting for answers, and not believing them."""

from darknight.fleet.fleet import Fleet
from darknight.fleet.local import local_fleet

__all__ = ["Fleet", "local_fleet"]
