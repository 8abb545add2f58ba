"""The libraries in C under valgrind, which sees what no sanitizer was compiled into: the very files that are installed.

torch takes too long under valgrind. So calls are written down with their operands while tests of the other files run,
and repeated without torch, in memory that ends where the operands end. valgrind knows no AVX-512: the libraries choose
AVX2 there, and have to find the same bits. The variants without vector instructions run too.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from darknight.kernels import (
    compiled_field,
    compiled_keystream,
    compiled_real,
    compiled_residues,
    compiled_sides,
    compiled_unmasking,
)
from kernels import (
    test_depthwise,
    test_few_rows,
    test_field,
    test_keystream,
    test_layers,
    test_real,
    test_residues,
    test_sides,
    test_unmasking,
    test_weights,
)
from kernels.recording import REPLAY, Recording
from kernels.test_residues import usable

NAMES = ("combine", "encode", "largest", "quantise", "unchanged", "below", "moments", "checksum", "rounding")
NAMES += (
    "weigh",
    "fold",
    "slide",
    "dot",
    "normalise",
    "by_running",
    "derive",
    "pool",
    "unpool",
    "project",
    "finish",
    "come_back",
    "unmask",
    "convolve",
    "convolve_back",
    "multiply",
    "derive_x",
    "derive_weight",
)


REAL = ("encode", "decode", "compare", "squares", "gaussian", "fold", "meet")
VARIANTS = ("avx2_", "plain_")  # whose sums over many numbers have an order of their own


def call_everything() -> None:
    """Some of what the other tests call, of every function."""
    for kind in ("", "plain_"):
        library = compiled_field.Library.loaded(kind)
        for length in test_field.LENGTHS:
            test_field.test_fixed_point_agrees_with_the_reference(library, length)
            test_field.test_what_changed_is_noticed_anywhere_and_what_rounds_to_the_same_is_not(library, length)
        for prime in test_field.PRIMES:
            test_field.test_combinations_agree_with_the_reference_and_with_exact_integers(library, prime, 7, False)
            test_field.test_encoding_agrees_with_the_reference(library, prime, 7, False)
        test_field.test_what_goes_past_the_cache_is_the_same(library, 1)
        test_field.test_moments_agree_with_the_reference_at_their_largest_too(library, (2, 3, 1300))
        test_field.test_checksums_agree_with_the_reference(library, (5, 2, 2049))
        test_field.test_words_are_cut_and_those_too_large_are_found_in_order(library, 5, 5000)
        test_field.test_words_of_the_rounding_agree_with_the_reference(library, 5003)
        test_residues.try_everything(compiled_residues.Library.loaded(kind), 10)
        for positions in test_unmasking.POSITIONS:
            function = compiled_unmasking.chosen.__wrapped__(kind)  # loaded again, and not as it was remembered
            test_unmasking.test_it_is_what_unmasking_and_weighing_give(function, positions, False)
    for seed in range(10):
        test_sides.try_everything(seed)
    test_residues.test_entries_of_vectors_are_those_of_the_reference((1000, 17), (2, 24))
    for kind in test_keystream.KINDS:
        function = compiled_keystream.chosen.__wrapped__(kind)
        for size in test_keystream.SIZES:
            test_keystream.agree(function, size, 12)
    for shape in test_weights.SHAPES:
        test_weights.agree(shape, 12, 1)
    for kind in VARIANTS if usable("avx2_") else VARIANTS[1:]:
        test_real.try_everything(compiled_real.Library.loaded(kind))
    for shape in test_layers.SHAPES:
        test_layers.test_a_batch_is_normalised_as_torch_does_and_derived(shape, True)
        test_layers.test_a_product_is_finished_as_torch_does_it_to_the_bit(shape, 1)
        test_layers.test_gradients_come_back_as_in_torch_with_their_sums_and_their_magnitude(shape, -1)
    test_layers.test_running_statistics_become_a_scale_and_a_shift(33)
    for window, size in test_layers.WINDOWS:
        test_layers.test_maxima_and_their_gradients_are_torchs(window, size)
    for case in test_depthwise.CASES:
        test_depthwise.try_every_kind(case)
    for case in test_few_rows.CASES:
        test_few_rows.try_every_kind(case)


def call_one() -> None:
    library = compiled_field.Library.loaded()
    compiled_field.quantise(library, torch.randn(1000), 256.0, None)


def recorded(calls, path: Path, monkeypatch) -> set[str]:
    """Writes down what `calls` calls; the names of those functions."""
    with monkeypatch.context() as patch:
        recording = Recording(path, patch)
        _load_again()
        calls()
        recording.close()
    _load_again()
    return recording.symbols


def _load_again() -> None:
    """What is remembered of libraries is forgotten."""
    remembered = (compiled_field.chosen, compiled_keystream.chosen, compiled_residues.chosen)
    for found in (*remembered, compiled_residues.drawing, compiled_sides.chosen):
        found.cache_clear()


def repeated(path: Path, valgrind: str, less: int = 0) -> subprocess.CompletedProcess[str]:
    """less: how many bytes too few the operands have."""
    options = ["--quiet", "--error-exitcode=9", "--leak-check=no", "--partial-loads-ok=no"]
    command = [valgrind, *options, sys.executable, "-I", "-S", "-c", REPLAY, str(path), str(less)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_valgrind_finds_nothing_in_the_libraries_and_something_in_a_call_that_reads_too_far(tmp_path, monkeypatch):
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind is not installed (Debian: apt-get install valgrind)")
    if compiled_field.chosen() is None:
        pytest.skip("nothing was compiled")
    symbols = recorded(call_everything, tmp_path / "everything", monkeypatch)
    called = {symbol.removeprefix("darknight_").rpartition("_")[0] for symbol in symbols}
    assert called >= {name + kind for name in NAMES for kind in ("", "_plain")}
    assert called >= {f"real_{name}_plain" for name in REAL}
    assert called >= {"keystream", "keystream_aes"} or compiled_keystream.chosen() is None
    assert called >= {"forward_sides", "grad_input_sides", "grad_weight_sides", "entries"}
    whole = repeated(tmp_path / "everything", valgrind)
    assert whole.returncode == 0, (whole.stdout + whole.stderr)[-3000:]
    assert whole.stdout.startswith("repeated ")

    recorded(call_one, tmp_path / "one", monkeypatch)
    assert repeated(tmp_path / "one", valgrind).returncode == 0
    broken = repeated(tmp_path / "one", valgrind, less=4)  # one number too few, and it is noticed: the test can fail
    assert broken.returncode == 9, broken.stdout
    assert "Invalid read of size" in broken.stderr
    assert "quantise" in broken.stderr
