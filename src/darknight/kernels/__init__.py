"""The hot loops of the enclave: a readable torch reference, and a compiled twin with the same results.

Each function is a handful of passes over whole tensors. The number of Python calls depends on the code (workers,
sources), never on the batch.

reference        what each of them is
masking, weighing    which of the two does it
compiled, compiled_field    the libraries of weigh.c and field.c
"""

from darknight.kernels.masking import (
    checksum,
    combine,
    cut_words,
    encode,
    largest_magnitude,
    moments,
    quantise_nearest,
    quantise_stochastic,
    unmask,
)
from darknight.kernels.reference import combine_grid, dequantise
from darknight.kernels.weighing import weigh

__all__ = [
    "checksum",
    "combine",
    "combine_grid",
    "cut_words",
    "dequantise",
    "encode",
    "largest_magnitude",
    "moments",
    "quantise_nearest",
    "quantise_stochastic",
    "unmask",
    "weigh",
]
