"""Our row of the paper's Table 1: runs the tests that each cell names, and writes down how they ended.

    python experiments/features.py --out results/features.json
    python experiments/features.py --out results/features.json --full     # those too that `make test-all` runs

A test that runs only with --full is `skipped` without it, and the report says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from recording import Recording, run_or_explain
from settings import chosen

from darknight.errors import DarKnightError
from darknight.report.our_features import OURS

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, which is resumed if it is there")
    parser.add_argument("--feature", action="append", help="only this one; may be repeated (default: all)")
    parser.add_argument("--full", action="store_true", help="at the full count")
    flags = parser.parse_args()
    names = chosen(flags.feature, OURS, "feature")
    run = Recording("features", flags.out, scale={"full": flags.full}, planned=names)
    for name in run.missing:
        tests = OURS[name].tests
        outcomes = [outcome(test, full=flags.full) for test in tests]
        run.add(name, {"feature": name, "tests": list(tests), "outcomes": outcomes})


def outcome(test: str, *, full: bool) -> str:
    """passed, failed or skipped; with parameters, the worst of them."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", test, f"--junitxml={report}", *["--full"] * full]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.is_file():
            raise DarKnightError(f"{test}: pytest did not run ({done.stderr.strip()[:200]}).")
        cases = list(ElementTree.parse(report).iter("testcase"))
    if not cases or any(case.find(bad) is not None for case in cases for bad in ("failure", "error")):
        return "failed"
    return "skipped" if any(case.find("skipped") is not None for case in cases) else "passed"


if __name__ == "__main__":
    run_or_explain(main)
