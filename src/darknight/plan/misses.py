"""What answers that go missing cost: the model by which spares are chosen.

Whoever is asked for something in a pass gives no answer that can be used with one probability, `unreliable`, each by
itself: its link breaks, it refuses, it is late, or it is wrong. What follows is read from fleet.Fleet.gather and
runtime.gathered:

- The enclave waits for everybody that it asked, until all have answered or the rest is late. So a spare shortens no
  wait, and is one more to wait for (Speeds.notice_ms).
- A forward pass and an input gradient need K + M of K + M + E answers. Only if more than E are missing does the enclave
  ask a second time: this round is what a spare saves. Somebody who idles in the pass is asked first, which in training
  M workers do; then a standby; then the enclave does the part itself.
- Parity wants all answers, and a weight gradient needs all of K + 2M: there a spare saves nothing.

That somebody fails in the second round too is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from darknight.plan.candidate import Candidate
from darknight.plan.flops import worker_flops
from darknight.plan.layers import Product
from darknight.plan.request import Speeds


@dataclass(frozen=True, kw_only=True)
class Misses:
    """How often an answer is missing, as a share of 1, and how many workers stand by."""

    unreliable: float = 0.0
    standbys: int = 0

    def more_than(self, spared: int, asked: int) -> float:
        """The probability that of `asked` answers more than `spared` are missing."""
        there = 1.0 - self.unreliable
        term = total = there**asked
        for missing in range(min(spared, asked)):
            term *= (asked - missing) / (missing + 1) * self.unreliable / there
            total += term
        return max(0.0, 1.0 - total)


RELIABLE = Misses()


def repeats(product: Product, candidate: Candidate, batch_size: int, speeds: Speeds, misses: Misses) -> float:
    """Seconds that one layer is expected to take longer in a step, because answers are missing."""
    if not misses.unreliable:
        return 0.0
    each = candidate.groups(batch_size) * candidate.width
    x, y, w = each * product.inputs, each * product.outputs, product.weights * candidate.width
    flops = worker_flops(product, candidate, batch_size)
    idle = candidate.workers > candidate.computing
    spared = 0 if candidate.parity else candidate.spares

    def again(moved: int, flops: int, *, idle: bool) -> float:
        if not idle and not misses.standbys:
            return flops / (speeds.enclave_gflops * 1e9)
        moved += w if candidate.training and not idle else 0  # a standby has no weights of this step
        return speeds.pass_ms / 1e3 + 8 * moved / (speeds.link_gbits * 1e9) + flops / (speeds.worker_gflops * 1e9)

    notice = speeds.notice_ms / 1e3
    short = misses.more_than(spared, candidate.computing)
    seconds = misses.more_than(0, candidate.workers) * notice + short * again(x + y, flops.forward, idle=idle)
    if not candidate.training:
        return seconds
    asked = candidate.workers if product.grad_input else candidate.base_workers
    seconds += misses.more_than(0, asked) * notice
    if product.grad_input:
        seconds += short * again(x + y, flops.grad_input, idle=idle)
    # The share of the input is made once more, by the enclave, for whoever does the part.
    lost = again(x + y + w, flops.grad_weight, idle=False) + x / (speeds.masking_gbytes * 1e9)
    return seconds + misses.more_than(0, candidate.base_workers) * lost
