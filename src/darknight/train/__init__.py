"""The training loop behind the command. It trains a protected model exactly as it trains any other."""

from darknight.train.card import Card
from darknight.train.checkpoint import Checkpoint, check_tensors, read_checkpoint
from darknight.train.history import Best, Epoch, History
from darknight.train.inference import Predictions, predict
from darknight.train.interrupt import Interrupts
from darknight.train.loop import Progress, Saving, check_recipe, evaluate, fit
from darknight.train.recipe import OPTIMIZERS, SCHEDULES, Recipe
from darknight.train.schedules import learning_rate_at
from darknight.train.store import Store, checkpoints_in, read_model
from darknight.train.tensorboard import TensorBoard

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Best",
    "Card",
    "Checkpoint",
    "Epoch",
    "History",
    "Interrupts",
    "Predictions",
    "Progress",
    "Recipe",
    "Saving",
    "Store",
    "TensorBoard",
    "check_recipe",
    "check_tensors",
    "checkpoints_in",
    "evaluate",
    "fit",
    "learning_rate_at",
    "predict",
    "read_checkpoint",
    "read_model",
]
