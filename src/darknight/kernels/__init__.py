"""The hot loops of the enclave, as a readable torch reference; weighed sums are compiled as well.

Each function is a handful of passes over whole tensors. The number of Python calls depends on the code (workers,
sources), never on the batch.
"""

from darknight.kernels.reference import combine, combine_grid, dequantise, quantise_nearest, quantise_stochastic
from darknight.kernels.weighing import weigh

__all__ = ["combine", "combine_grid", "dequantise", "quantise_nearest", "quantise_stochastic", "weigh"]
