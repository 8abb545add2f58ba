"""What happens when a check fails: the liars are found, named and put out, and the pass is done again without them.

Guarantees: a result comes back only if the check passed, with the answers of workers that remain or with the enclave's
    own; otherwise IntegrityError. Whoever is put out gave a wrong answer (integrity.blame says how surely), and the
    ledger has the evidence: layer, call, pass, check, and what was found; no values of data. Contract tests:
    tests/runtime/test_integrity.py, tests/runtime/test_attacks.py. An answer that its worker changes while it is read
    is one answer like any other, right or wrong: what was read once is what was decoded and checked. A worker that
    changes a wrong answer back before it is looked at again is not found by that, but can do it once: from then on
    answers are copied first (contract test: tests/runtime/test_changed_answers.py).
Assumes: what integrity.blame assumes.
Leaks: to a worker, that it was found out: it gets no work any more. To learn what was wrong with it, it is asked once
    about a mixture of the groups of the very share that it holds, which tells it nothing that it does not know. In real
    arithmetic, whether an error near the tolerance is noticed depends on the size of results, as the tolerance does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from darknight.accounting import Blamed, Ledger, Unexplained
from darknight.coding import Scheme
from darknight.coding.field import NotResidues
from darknight.errors import IntegrityError
from darknight.integrity import blame
from darknight.randomness import Randomness, uniform_below
from darknight.runtime.checking import checking, freivalds_checks, note_unchecked
from darknight.runtime.exchange import Exchange
from darknight.runtime.gathered import Gathered, Mix
from darknight.runtime.layer import Layer
from darknight.runtime.phases import phase
from darknight.types import Pass

WRONG = "a wrong answer"
STALE = "an answer with the weights of an earlier step"
OTHER = "an answer as if with other weights than it was sent"
_LARGEST = 3.0  # of the factors in a mixture of floats


Answers = dict[int, Tensor]
Result = TypeVar("Result")  # of a pass: integers and floats in the field, floats in real arithmetic


@dataclass(eq=False, kw_only=True, slots=True)
class Case(Generic[Result]):
    """One pass.

    decode: the result, from answers by seat; it raises if parity is checked and does not hold. verify: raises if the
    result is wrong; it is told whether this is a `further` check of the pass. given: what the worker of a seat was
    given. spreads: by seat, how far an honest answer may be off (Real). further: the pass was checked before; then
    `decode_further` decodes, if it is there.
    """

    decode: Callable[[Answers], Result]
    verify: Callable[[Result, Answers, bool], object]
    given: Callable[[int], blame.Given]
    spreads: Callable[[], dict[int, float]] = dict
    further: bool = False
    decode_further: Callable[[Answers], Result] | None = None

    def decoded(self, answers: Answers) -> Result:
        again = self.decode_further if self.further else None
        return (again or self.decode)(answers)


class Trial:
    """Lets results pass that are right, and finds those who keep them from being so."""

    def __init__(self, scheme: Scheme, exchange: Exchange, randomness: Randomness, ledger: Ledger) -> None:
        self._scheme = scheme
        self._exchange = exchange
        self._prime = exchange.prime
        self._randomness = randomness
        self._ledger = ledger

    def settled(self, layer: Layer, gathered: Gathered, case: Case[Result]) -> Result:
        """The result of the pass, verified; without the workers that gave wrong answers."""
        out = [seat for seat, worker in gathered.by.items() if self._exchange.is_out(worker)]
        if out:  # since another pass of the same call: nothing that it gave is believed
            gathered.without(out)
        vanished = ""  # the check that failed, though no answer is wrong any more
        while True:
            try:
                result = self._checked(layer, gathered, case)
            except NotResidues as error:
                liars = {seat: gathered.by[seat] for seat in error.workers}
                self._exchange.outside_field(layer, gathered.call, gathered.kind, liars)
                gathered.without(error.workers)
            except IntegrityError as error:
                if not gathered.by:  # nobody is left to be wrong but the enclave
                    raise IntegrityError(
                        f"{error} Not even the enclave's own computation passes: suspect the memory or the processor "
                        "of this machine. Nothing of the result was used.",
                        kind=error.kind,
                        check=error.check,
                    ) from None
                vanished = self._punish(layer, gathered, case, error.check)
                case = replace(case, further=True)
            else:
                if vanished:  # an answer was another one when it was decoded first
                    self._exchange.copy_answers()
                    self._note_unexplained(layer, gathered, vanished)
                note_unchecked(self._scheme, self._ledger, layer, gathered.kind)
                return result

    def _checked(self, layer: Layer, gathered: Gathered, case: Case[Result]) -> Result:
        kind, answers = gathered.kind, gathered.answers
        with phase("decode"):
            result = case.decoded(answers)
        if freivalds_checks(self._scheme, kind):
            with phase("check"), checking(self._ledger, layer, kind, "freivalds"):
                case.verify(result, answers, case.further)
        return result

    def _punish(self, layer: Layer, gathered: Gathered, case: Case[Result], check: str) -> str:
        """Puts out whoever gave a wrong answer, and replaces what it gave.

        Returns the check if there is none, now that answers are copies that nobody can change: these are to be tried.
        """
        lent = gathered.take_copies()
        by, answers = dict(gathered.by), gathered.answers
        findings = {seat: WRONG for seat in by if not self._right(case, seat, answers[seat])}
        if findings:
            findings |= self._explained(layer, gathered, case, findings)
            self._put_out(layer, gathered, check, by, findings)
            gathered.without(findings)
            return ""
        if lent:
            return check
        # Errors that are too small for each alone, and not for their sum (Real). The enclave does it all, and can then
        # compare element by element.
        theirs = gathered.done_by_enclave()
        findings = {seat: WRONG for seat in theirs if not self._equal(case, seat, theirs[seat], answers[seat])}
        if not findings:
            self._note_unexplained(layer, gathered, check)
        self._put_out(layer, gathered, check, by, findings)
        return ""

    def _note_unexplained(self, layer: Layer, gathered: Gathered, check: str) -> None:
        self._ledger.record(Unexplained(layer=layer.label, call=gathered.call, kind=gathered.kind, check=check))

    def _put_out(
        self, layer: Layer, gathered: Gathered, check: str, by: dict[int, int], findings: dict[int, str]
    ) -> None:
        kind, call = gathered.kind, gathered.call
        for seat, finding in findings.items():
            reason = f"it gave {finding} (layer {layer.label}, call {call}, {kind.value}; found by {check})"
            self._exchange.expel(by[seat], reason)
            self._ledger.record(
                Blamed(
                    layer=layer.label,
                    call=call,
                    kind=kind,
                    check=check,
                    worker=self._exchange.name(by[seat]),
                    seat=seat,
                    finding=finding,
                )
            )

    # --- what is wrong ----------------------------------------------------------------------------------------------
    def _right(self, case: Case[Result], seat: int, answer: Tensor, weights: Tensor | None = None) -> bool:
        """Whether the answer fits what its worker was given, or would with other `weights`."""
        given, stream = case.given(seat), self._randomness.fresh()
        if weights is not None:
            given = replace(given, w=weights)
        if self._prime is None:
            return blame.right_in_floats(given, answer, case.spreads()[seat], stream)
        return blame.right_in_field(given, answer, self._prime, stream)

    def _equal(self, case: Case[Result], seat: int, answer: Tensor, own: Tensor) -> bool:
        if self._prime is None:
            return blame.equal_in_floats(answer, own, case.spreads()[seat])
        return blame.equal_in_field(answer, own, self._prime)

    def _explained(self, layer: Layer, gathered: Gathered, case: Case[Result], seats: Iterable[int]) -> dict[int, str]:
        """Those of the liars whose weights are to blame: a weight gradient has none.

        Weights of the step before are tried. For any others there is no such test; but whoever computes with other
        weights does so every time, so its answer to a mixture of what it holds is the mixture of its answers.
        """
        if gathered.kind is Pass.GRAD_WEIGHT:
            return {}
        found = {}
        if (earlier := layer.earlier) is not None:
            found = {seat: STALE for seat in seats if self._right(case, seat, gathered.answers[seat], earlier)}
        mixtures = {seat: self._mixture(len(gathered.answers[seat])) for seat in seats if seat not in found}
        for seat, said in gathered.question(mixtures).items() if mixtures else ():
            mix, answer = mixtures[seat], gathered.answers[seat]
            if self._prime is None:  # larger weights than ours round by more
                spread = case.spreads()[seat] + torch.finfo(answer.dtype).eps * float(answer.abs().max())
                same = blame.equal_in_floats(said, mix(answer), _LARGEST * len(answer) * spread)
            else:
                same = blame.equal_in_field(said, mix(answer), self._prime)
            if same:
                found[seat] = OTHER
        return found

    def _mixture(self, groups: int) -> Mix:
        """A random one, for one worker alone: of several that exchange answers, each is asked something else."""
        if self._prime is None:  # never 1: who adds the same to every answer gives itself away
            picked = uniform_below(self._randomness.fresh(), (groups,), 4).tolist()
            factors = torch.tensor([(-_LARGEST, -2, 2, _LARGEST)[place] for place in picked], dtype=torch.float64)
            return lambda tensor: torch.tensordot(factors, tensor.to(torch.float64), 1).unsqueeze(0).to(tensor.dtype)
        prime = self._prime
        multiples = (uniform_below(self._randomness.fresh(), (groups,), prime - 1) + 1).tolist()

        def mixed(tensor: Tensor) -> Tensor:
            total = torch.zeros_like(tensor[:1], dtype=torch.int64)
            for multiple, part in zip(multiples, torch.split(tensor, 1), strict=True):
                total.add_(part.to(torch.int64).mul_(multiple)).remainder_(prime)
            return total.to(tensor.dtype)

        return mixed
