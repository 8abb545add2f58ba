"""The training loop behind the command. It trains a protected model exactly as it trains any other."""

from darknight.train.interrupt import Interrupts
from darknight.train.loop import Epoch, History, Progress, check_settings, evaluate, fit

__all__ = ["Epoch", "History", "Interrupts", "Progress", "check_settings", "evaluate", "fit"]
