"""The one thing that pyproject.toml cannot say in words that are settled: a library in C, where there is a compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "darknight.kernels._weigh",
            sources=["src/darknight/kernels/weigh.c"],
            depends=["setup.py"],
            extra_compile_args=["-O3", "-fopenmp-simd"],
            # Without a compiler the installation goes on, and a torch reference does the same more slowly.
            optional=True,
        )
    ]
)
