"""From a scheme to the coefficients of one masking."""

from __future__ import annotations

from darknight.coding.arithmetic import Field
from darknight.coding.code import Code
from darknight.coding.dense import field_dense, real_dense
from darknight.coding.scheme import Scheme
from darknight.coding.systematic import field_systematic, real_systematic
from darknight.randomness import Stream


def draw_code(scheme: Scheme, stream: Stream) -> Code:
    """The public constants of the systematic code, or fresh secret coefficients of the dense one."""
    K, M, E, masked = scheme.inputs, scheme.colluders, scheme.spares, scheme.sends_masked_gradients
    if isinstance(scheme.arithmetic, Field):
        prime = scheme.arithmetic.prime
        if scheme.mixing == "systematic":
            return field_systematic(K, M, E, prime, masked)
        return field_dense(stream, K, M, E, prime, masked)
    if scheme.mixing == "systematic":
        return real_systematic(K, M, E, masked)
    return real_dense(stream, K, E, masked)
