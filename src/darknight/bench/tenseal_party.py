"""A server that computes on images encrypted with TenSEAL, run as a script by an interpreter that has TenSEAL.

It prints a JSON object a line: first {"ready": version}, or {"missing": why}; then, for each line that it reads, what
the network took for the first image, encrypted, and its scores. It ends with its standard input. Nothing of DarKnight
is imported here.

The time is that of the server alone: encrypting the image and decrypting its scores are not in it. CKKS with 8192
coefficients of 218 bits, 128 bits of security; two squares and three products use up its levels.

    python tenseal_party.py arrays.npz 2    # threads
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

STRIDE = 3
_DEGREE = 8192
_SCALE_BITS = 26
_LEVELS = 6
_OUTER_BITS = 31


def main(arrays: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is not an answer

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        import tenseal
    except ImportError as error:
        say({"missing": str(error)})
        return
    given = dict(np.load(arrays))
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        poly_modulus_degree=_DEGREE,
        coeff_mod_bit_sizes=[_OUTER_BITS, *[_SCALE_BITS] * _LEVELS, _OUTER_BITS],
        n_threads=int(threads),
    )
    context.global_scale = 2**_SCALE_BITS
    context.generate_galois_keys()
    kernels = given["0.weight"][:, 0].tolist()
    first, second = given["3.weight"].T.tolist(), given["5.weight"].T.tolist()
    biases = [given[f"{layer}.bias"].tolist() for layer in (0, 3, 5)]
    height, width = given["0.weight"].shape[2:]
    image = given["images"][0, 0].tolist()
    say({"ready": f"tenseal {tenseal.__version__}"})
    for _ in sys.stdin:
        encrypted, windows = tenseal.im2col_encoding(context, image, height, width, STRIDE)
        begun, computed = time.perf_counter(), time.process_time()
        maps = [
            encrypted.conv2d_im2col(kernel, windows) + bias for kernel, bias in zip(kernels, biases[0], strict=True)
        ]
        hidden = tenseal.CKKSVector.pack_vectors(maps).square_().mm(first) + biases[1]
        scores = hidden.square_().mm(second) + biases[2]
        took = {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - computed}
        say({**took, "result": scores.decrypt()})


if __name__ == "__main__":
    main(*sys.argv[1:])
