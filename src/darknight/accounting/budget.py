"""The budget: what may be shown about one example that is in every batch, in nats. Asked before anything is sent."""

from __future__ import annotations

import math
import weakref

from darknight.accounting.accountant import Accountant
from darknight.coding import Scheme
from darknight.errors import PrivacyBudgetError, SchemeError, UsageError

_ROUNDING = 1 + 1e-9  # of sums of many equal numbers
_REMEDY = "Stop here, or go on with a larger leakage_budget, with more noise, or with dk.Field(), which leaks nothing."


def check_budget(budget: float | None, scheme: Scheme, *, one_operator: bool) -> None:
    """Raises unless the budget is a number of nats, and the scheme has a bound that it can be compared with."""
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise UsageError(f"leakage_budget={budget!r}; needs a positive number of nats, or None for no budget.")
    if scheme.training and not scheme.mask_gradients:
        raise SchemeError(
            "a leakage_budget, and a scheme that sends gradients in the clear: for them there is no bound. Use "
            "mask_gradients=True (not --arithmetic paper), or drop the budget."
        )
    if one_operator:
        raise SchemeError(
            "a leakage_budget, and a fleet with insecure_one_operator=True: one operator may see everything. Use "
            "workers of separate operators, or drop the budget."
        )


class Budget:
    """Lets a masking happen or raises PrivacyBudgetError.

    A forward call that can be differentiated is let through only if its own gradient can be masked as well. A step is
    let begin only if the costliest step so far would fit once more. A step begins when a protected model, or a layer by
    itself, is called with gradients enabled and a backward pass is over, or nothing is left to differentiate; it ends
    with the last masking of its backward passes.

    Guarantees: the sum of what was let through never exceeds `limit`. What raises was not sent. A step that costs no
        more than the costliest before it is refused when it begins, or not at all; any other one in its forward passes,
        unless it recomputes activations, or differentiates a graph twice (contract tests:
        tests/accounting/test_budget.py, tests/runtime/test_budget.py).
    Assumes: what accounting.accountant assumes; one step at a time. Layers that run under torch.no_grad() after a
        backward pass are not counted as part of a step: the limit holds for each by itself.
    Leaks: that the training ended.
    """

    def __init__(self, limit: float | None, accountant: Accountant) -> None:
        self.limit = limit
        self._accountant = accountant
        self._promised: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()  # gradients to come
        self._forward = False  # a step has begun, and no backward pass of it
        self._step = 0.0  # what the present one has cost

    @property
    def left(self) -> float | None:
        return None if self.limit is None else max(0.0, self.limit - self._accountant.total.nats)

    # --- what happens ---------------------------------------------------------------------------------------------
    def model_called(self) -> None:
        """A model that can be differentiated begins a forward pass."""
        if not self._forward or not self._promised:
            self._begin()

    def forward(self, layer: str, nats: float, *, later: float, keep: bool, recomputed: bool) -> None:
        """A layer's input is to be masked. `later`: what its gradient will need; `keep`: whether there can be one.

        recomputed: inside a backward pass, which belongs to the step whatever it keeps.
        """
        if keep and not recomputed and not self._forward:
            self._begin()
        self._admit(layer, "input", nats + (0.0 if recomputed else later))
        if self._forward or recomputed:
            self._count(nats)

    def promise(self, call: object, later: float) -> None:
        """The gradient of a call that was let through. It is forgotten with the call."""
        self._promised[call] = later

    def backward(self, layer: str, nats: float, call: object) -> None:
        """A layer's gradient is to be masked."""
        self._promised.pop(call, None)
        self._forward = False
        self._admit(layer, "gradient", nats)
        self._count(nats)

    def _count(self, nats: float) -> None:
        self._step += nats
        self._accountant.costliest_step = max(self._accountant.costliest_step, self._step)

    # --- whether it may -------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        self._step, self._forward = 0.0, False
        self._refuse("one more step, if it costs as much as the costliest so far,", self._accountant.costliest_step)
        self._forward = True

    def _admit(self, layer: str, what: str, nats: float) -> None:
        self._refuse(f"layer {layer}: its {what}", nats)

    def _refuse(self, what: str, nats: float) -> None:
        """Raises if so much more would be too much."""
        if self.limit is None:
            return
        used = self._accountant.total.nats + sum(self._promised.values())
        if used + nats > self.limit * _ROUNDING:
            raise PrivacyBudgetError(
                f"{what} may show workers {nats:.3g} nats about an example that is in every batch, and {used:.3g} of "
                f"the {self.limit:.3g} of leakage_budget are used. It was not sent. {_REMEDY}",
                budget=self.limit,
                used=used,
                needed=nats,
            )
