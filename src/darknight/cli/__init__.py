"""The command `darknight`."""

import sys

try:
    from darknight.cli.app import main
except KeyboardInterrupt:  # loading torch takes seconds, in which Ctrl-C should not show a traceback either
    sys.exit(130)

__all__ = ["main"]
