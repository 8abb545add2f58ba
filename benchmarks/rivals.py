"""How much faster than CrypTen do we train, and than TenSEAL infer? All in turns, in one run, with what each protects.

Target: a training step of the same small CNN, batch 64, K=4, M=1, gradients masked, Freivalds, all workers on this
machine, at least 50 times faster than CrypTen's two parties, on each of two networks (average and max pooling). Exits
with 1 if that is missed. The rivals are no dependencies of ours; set them up once, in an environment of their own:

    python -m venv rivals
    SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True \\
        rivals/bin/pip install torch==2.13.0 crypten==0.4.1 tenseal==0.3.18

    OMP_NUM_THREADS=1 python benchmarks/rivals.py --python rivals/bin/python [--times 5] [--json]

Without --python (or the variable DARKNIGHT_RIVALS) it measures plain and ours, says what is absent, and ends with 0.
Takes two to five minutes: a TenSEAL image takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from darknight.bench.rival import PROTECTION, Contest, Cost, Rivals, measure_rivals
from darknight.errors import DarKnightError

TARGET = 50.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = os.environ.get("DARKNIGHT_RIVALS")
    parser.add_argument("--python", type=Path, default=Path(named) if named else None, help="has CrypTen and TenSEAL")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--times", type=int, default=5, help="turns of each, the best counts")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        rivals = measure_rivals(given.python, batch=given.batch, times=given.times, progress=_progress)
    except DarKnightError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    finally:
        print(file=sys.stderr)
    if given.json:
        print(json.dumps(rivals.words(), indent=2))
    else:
        _print(rivals)
    return 0 if rivals.crypten is None or rivals.crypten >= TARGET else 1


def _progress(words: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def _print(rivals: Rivals) -> None:
    for pooling, contest in rivals.training.items():
        _print_contest(contest, f"training, {pooling} pooling, a step of {rivals.batch} images")
    _print_contest(rivals.inference, f"inference, an image (plain and ours: one of {rivals.batch} at once)")
    print("What is protected, and from whom:")
    for who, words in PROTECTION.items():
        print(f"  {who:8} {words}")
    if rivals.crypten is not None:
        met = "met" if rivals.crypten >= TARGET else "MISSED"
        print(f"\ntraining: {rivals.crypten:.1f} times faster than CrypTen at least; target {TARGET:.0f}: {met}")


def _print_contest(contest: Contest, what: str) -> None:
    print(f"{what}\n  {contest.network}")
    print(f"  {'':8} {'ms':>10} {'/ plain':>9} {'/ ours':>9}   {'processor ms':>12} {'/ plain':>9} {'/ ours':>9}")
    for who, cost in (("plain", contest.plain), ("ours", contest.ours), (contest.rival_name, contest.rival)):
        print(f"  {who:8} {_columns(cost, contest) if cost else 'absent: ' + str(contest.absent)}")
    print()


def _columns(cost: Cost, contest: Contest) -> str:
    passed = _ratios(cost.seconds, contest.plain.seconds, contest.ours.seconds)
    worked = _ratios(cost.processor_seconds, contest.plain.processor_seconds, contest.ours.processor_seconds)
    return f"{cost.seconds * 1e3:10.3f} {passed}   {cost.processor_seconds * 1e3:12.3f} {worked}"


def _ratios(cost: float, plain: float, ours: float) -> str:
    return f"{cost / plain:9.1f} {cost / ours:9.2f}"


if __name__ == "__main__":
    sys.exit(main())
