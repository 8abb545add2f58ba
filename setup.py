"""The one thing that pyproject.toml cannot say in words that are settled: libraries in C, where there is a compiler."""

from setuptools import Extension, setup

HEADERS = ("few_rows", "field", "residues", "sides", "wide")


def library(name: str, *flags: str) -> Extension:
    """kernels/_NAME from kernels/NAME.c. Without a compiler the installation goes on, on a slower torch reference."""
    return Extension(
        f"darknight.kernels._{name}",
        sources=[f"src/darknight/kernels/{name}.c"],
        depends=["setup.py", *(f"src/darknight/kernels/{header}.h" for header in HEADERS)],
        extra_compile_args=["-O3", "-fopenmp-simd", *flags],
        optional=True,
    )


# Nobody looks at floating-point exceptions. In field.c, layers.c, depthwise.c and real.c a product is rounded before it
# is added to, as in torch; few_rows.c says itself where it is not; in residues.c and unmasking.c all sums are exact.
setup(
    ext_modules=[
        library("residues", "-fno-math-errno", "-fno-trapping-math"),
        library("unmasking", "-fno-math-errno", "-fno-trapping-math"),
        library("layers", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
        library("depthwise", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
        library("few_rows", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
        library("field", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
        library("keystream"),
        library("weights", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
        library("real", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    ]
)
