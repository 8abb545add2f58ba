"""The libraries in C under sanitizers: of addresses and undefined behaviour, on the same shapes as everywhere else; and
of threads, with the parts that they are called in.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "darknight" / "kernels"

# What each script begins with: the libraries are those that were built with sanitizers.
PRELUDE = """
import ctypes, random, sys, threading
from pathlib import Path

import torch

from darknight.kernels import compiled, threads
from darknight.kernels.compiled_field import Library

folder = Path(sys.argv[1])


def loaded(name, symbol, arguments, result=None):
    function = getattr(ctypes.CDLL(str(folder / f"{name}.so")), symbol)
    function.argtypes, function.restype = arguments, result
    return function


compiled.loaded = loaded
"""

# Runs the tests of the other files; torch's memory is watched as well.
SCRIPT = """
from darknight.kernels import compiled_real, compiled_residues, compiled_unmasking
from kernels import test_depthwise, test_few_rows, test_field, test_keystream, test_layers, test_real, test_residues
from kernels import test_sides, test_unmasking, test_weights

if sys.argv[2] == "broken":
    library = Library.loaded()
    short, enough = torch.zeros(999, dtype=torch.int32), torch.zeros(1000)
    library.quantise(enough.data_ptr(), None, 1000, 1.0, short.data_ptr())
if sys.argv[2] == "broken real":
    real, few = compiled_real.Library.loaded(), torch.zeros(1, 999)
    sizes = {"outer": 1, "channels": 1, "inner": 1000, "wide": 0, "last": 1}
    what = compiled_real._Measure(x=few.data_ptr(), sums=few.data_ptr(), **sizes)
    real.squares(ctypes.byref(what))
for kind in ("", "plain_"):
    library = Library.loaded(kind)
    for prime in test_field.PRIMES:
        test_field.test_combinations_agree_with_the_reference_and_with_exact_integers(library, prime, 7, False)
        test_field.test_encoding_agrees_with_the_reference(library, prime, 7, False)
    for length in test_field.LENGTHS:
        test_field.test_fixed_point_agrees_with_the_reference(library, length)
    test_field.test_what_goes_past_the_cache_is_the_same(library, 1)
    for shape in ((3, 1100, 1), (2, 3, 1300)):
        test_field.test_moments_agree_with_the_reference_at_their_largest_too(library, shape)
        for value in (-(2.0**60), float("nan")):
            test_field.test_at_a_scale_that_is_too_large_the_magnitude_is_found_all_the_same(library, shape, value)
    test_field.test_checksums_agree_with_the_reference(library, (5, 2, 2049))
    test_field.test_words_of_the_rounding_agree_with_the_reference(library, 5003)
    test_field.test_words_are_cut_and_those_too_large_are_found_in_order(library, 5, 5000)
    test_residues.try_everything(compiled_residues.Library.loaded(kind))
    for positions in test_unmasking.POSITIONS:
        test_unmasking.test_it_is_what_unmasking_and_weighing_give(compiled_unmasking.chosen(kind), positions, False)
    test_real.try_everything(compiled_real.Library.loaded(kind))
for seed in range(60):
    test_sides.try_everything(seed)
test_residues.test_entries_of_vectors_are_those_of_the_reference((1000, 17), (2, 24))
for shape in test_weights.SHAPES:
    test_weights.agree(shape, 12, 1)
test_weights.past_the_cache("")
test_weights.past_the_cache("plain_")
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
for kind in test_keystream.KINDS:
    for size in test_keystream.SIZES:
        test_keystream.test_it_is_aes_256_in_counter_mode(kind, 12, size)
print("done")
"""

# Every kernel in three parts, on threads of our pool. torch itself has one: its own synchronisation would not be seen.
# Python's lock is seen, so two calls are compared only if they overlap in time: some operands are large, for that.
THREADED = """
from kernels import test_threaded

torch.get_num_threads = lambda: 3
threads._EACH = 1
library, words, values = Library.loaded(), torch.zeros(1 << 20, dtype=torch.int32), torch.randn(1 << 20)


def overlapping(first, last):
    library.quantise(values.data_ptr(), None, 1 << 20, 1.0, words.data_ptr())


if sys.argv[2] == "broken":
    for _ in range(20):
        threads.split(overlapping, 3, 1 << 20)
for kernel in test_threaded.KERNELS:
    draw = random.Random(kernel.__name__)
    for _ in range(10):
        kernel(draw)()
for run in test_threaded.large().values():
    run()
print("done")
"""


def built(folder: Path, kinds: list[str], runtime: str, script: str, options: dict[str, str]):
    """A function that runs the script with libraries built with these sanitizers."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: nothing can be compiled")
    found = subprocess.run([compiler, f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
    if not os.path.isabs(found.stdout.strip()):
        pytest.skip(f"this compiler has no {runtime}")
    flags = ["-O1", "-g", "-shared", "-fPIC", *kinds]
    flags += ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
    for name in ("depthwise", "few_rows", "field", "keystream", "layers", "real", "residues", "unmasking", "weights"):
        command = [compiler, *flags, "-o", str(folder / f"{name}.so"), str(SOURCES / f"{name}.c"), "-lm"]
        subprocess.run(command, check=True)
    environment = {
        **os.environ,
        **options,
        "LD_PRELOAD": found.stdout.strip(),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PRELUDE + script, str(folder), what]
        return subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)

    return run


@pytest.mark.full
def test_no_sanitizer_complains(tmp_path: Path):
    kinds = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    run = built(tmp_path, kinds, "libasan.so", SCRIPT, {"ASAN_OPTIONS": "detect_leaks=0"})  # leaks: Python's own
    done = run("whole")
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-3000:]
    for what in ("broken", "broken real"):  # one element too few, and it is noticed: the test can fail
        broken = run(what)
        assert broken.returncode != 0
        assert "heap-buffer-overflow" in broken.stderr


@pytest.mark.full
def test_parts_of_a_pass_touch_nothing_in_common(tmp_path: Path):
    run = built(tmp_path, ["-fsanitize=thread"], "libtsan.so", THREADED, {"TSAN_OPTIONS": "halt_on_error=1"})
    done = run("whole")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run under this kernel's layout of memory")
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-3000:]
    broken = run("broken")  # three parts that write the same, and it is noticed: the test can fail
    assert broken.returncode != 0
    assert "data race" in broken.stderr
    assert "quantise" in broken.stderr
