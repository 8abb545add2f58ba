"""The hot loops of the enclave: a readable torch reference, and a compiled twin with the same results.

Each function is a handful of passes over whole tensors. The number of Python calls depends on the code (workers,
sources), never on the batch.

reference, reference_residues, reference_real    what each of them is
masking, residues, real                          which of the two does it
compiled_*                                       the libraries of the C files of these names
threads                                          several cores for one pass of a library
"""

from darknight.kernels.compiled_unmasking import Weighing
from darknight.kernels.masking import (
    Encoded,
    checksum,
    combine,
    cut_words,
    encode,
    largest_magnitude,
    moments,
    quantise_nearest,
    quantise_stochastic,
    requantise,
    rounding_words,
    survey,
    unchanged,
    unmask,
    unmask_weighed,
)
from darknight.kernels.reference import Requantised, Rounding, are_residues, dequantise

__all__ = [
    "Encoded",
    "Requantised",
    "Rounding",
    "Weighing",
    "are_residues",
    "checksum",
    "combine",
    "cut_words",
    "dequantise",
    "encode",
    "largest_magnitude",
    "moments",
    "quantise_nearest",
    "quantise_stochastic",
    "requantise",
    "rounding_words",
    "survey",
    "unchanged",
    "unmask",
    "unmask_weighed",
]
