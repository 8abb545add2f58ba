"""python -m darknight.worker"""

import sys

from darknight.worker.program import main

if __name__ == "__main__":
    sys.exit(main())
