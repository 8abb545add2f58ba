"""The training loop behind the command. It trains a protected model exactly as it trains any other."""

from darknight.train.card import Card
from darknight.train.checkpoint import (
    Checkpoint,
    check_tensors,
    checkpoint_as_bytes,
    checkpoint_from_bytes,
    read_checkpoint,
)
from darknight.train.history import Best, Epoch, History
from darknight.train.inference import Predictions, predict, prediction_rows
from darknight.train.interrupt import Interrupts
from darknight.train.loop import Keeper, Progress, Saving, check_recipe, evaluate, fit
from darknight.train.plain import plain
from darknight.train.protected import protected
from darknight.train.recipe import OPTIMIZERS, SCHEDULES, Recipe
from darknight.train.schedules import learning_rate_at
from darknight.train.store import Store, checkpoints_in, read_model
from darknight.train.tensor_file import tensors_as_bytes, tensors_from_bytes
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
    "Keeper",
    "Predictions",
    "Progress",
    "Recipe",
    "Saving",
    "Store",
    "TensorBoard",
    "check_recipe",
    "check_tensors",
    "checkpoint_as_bytes",
    "checkpoint_from_bytes",
    "checkpoints_in",
    "evaluate",
    "fit",
    "learning_rate_at",
    "plain",
    "predict",
    "prediction_rows",
    "protected",
    "read_checkpoint",
    "read_model",
    "tensors_as_bytes",
    "tensors_from_bytes",
]
