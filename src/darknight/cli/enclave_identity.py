"""The enclave's identity, for commands that speak to workers."""

from __future__ import annotations

import logging
from pathlib import Path

from darknight.wire.identity import CERTIFICATE_FILE, ENCLAVE, KEY_FILE, Identity

log = logging.getLogger("darknight")


def enclave_identity(folder: Path) -> Identity:
    """What the folder holds. Whoever mistyped the folder, or comes for the first time, is told that it was made."""
    was_there = (folder / KEY_FILE).exists()
    mine = Identity.load_or_create(folder, ENCLAVE)
    if not was_there:
        log.warning(
            "a new identity was made in %s; give its %s to the operators, whose workers know no other (%s)",
            folder,
            CERTIFICATE_FILE,
            mine.fingerprint,
        )
    return mine
