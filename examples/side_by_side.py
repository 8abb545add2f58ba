"""Runs an example with DarKnight and without it, and shows the losses side by side.

python examples/side_by_side.py examples/lightning_trainer.py
python examples/side_by_side.py examples/plain_script.py --steps 20
"""

import re
import subprocess
import sys
from collections.abc import Sequence

ROWS = 8  # of the table: the first step, the last, and some between


def losses(script: str, *options: str) -> dict[int, float]:
    """step -> loss, as the script says them."""
    done = subprocess.run([sys.executable, script, *options], stdout=subprocess.PIPE, text=True, check=True)
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def table(plain: dict[int, float], private: dict[int, float]) -> str:
    steps = sorted(plain)
    shown = sorted({steps[round(at * (len(steps) - 1) / (ROWS - 1))] for at in range(ROWS)})
    lines = ["| step | plain | private | difference |", "|---|---|---|---|"]
    lines += [
        f"| {step} | {plain[step]:.4f} | {private[step]:.4f} | {private[step] - plain[step]:+.4f} |" for step in shown
    ]
    largest = max(abs(private[step] - plain[step]) for step in steps)
    return "\n".join([*lines, f"\nLargest difference in {len(steps)} steps: {largest:.4f}"])


def main(arguments: Sequence[str]) -> None:
    script, *options = arguments
    plain, private = losses(script, "--plain", *options), losses(script, *options)
    if plain.keys() != private.keys():
        sys.exit("the two runs took different steps.")
    print(table(plain, private))


if __name__ == "__main__":
    main(sys.argv[1:])
