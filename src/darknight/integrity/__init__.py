"""Checks of what workers return. A check raises or gives back the verified result; it never returns a verdict."""

from darknight.integrity.freivalds import verified_forward, verified_grad_input, verified_grad_weight

__all__ = ["verified_forward", "verified_grad_input", "verified_grad_weight"]
