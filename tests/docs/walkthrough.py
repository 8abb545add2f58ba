"""The shell blocks of a page, run in order as one script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import warm
from fleet.workers import free_port

_KILL_ALL = "trap 'kill -KILL $(jobs -p) 2>/dev/null || true' EXIT\n"


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def walked(page: Path, folder: Path, *, ports: Collection[str] = ()) -> subprocess.CompletedProcess[str]:
    """What came of it. ports: those of the page, for which others are taken, because these may be in use."""
    script = "\n".join(blocks(page, "sh"))
    for port in ports:
        assert f":{port}" in script
        script = script.replace(f":{port}", f":{free_port()}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DARKNIGHT_")}
    (own := folder / "bin").mkdir()
    paths = (warm.command(own), Path(sys.executable).parent, environment["PATH"])
    environment["PATH"] = os.pathsep.join(map(str, paths))
    # The output goes to a file: a process that stayed behind would keep a pipe open, and hold up the test.
    with (folder / "said.txt").open("w+") as said:
        done = subprocess.run(
            ["bash", "-c", f"set -euo pipefail\n{_KILL_ALL}{script}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
    return subprocess.CompletedProcess(done.args, done.returncode, (folder / "said.txt").read_text())
