"""Structural similarity against its definition, written out."""

import numpy as np
import pytest
import torch

from darknight.audit.likeness import structural_similarity


def by_the_book(x, y, span):
    """One channel, by loops: the window at every place where it fits, weights of deviation 1.5."""
    height, width = x.shape
    sizes = [min(11, side - 1 + side % 2) for side in (height, width)]
    axes = [np.exp(-((np.arange(size) - size // 2) ** 2) / (2 * 1.5**2)) for size in sizes]
    weights = np.outer(*axes) / np.outer(*axes).sum()
    c1, c2, found = (0.01 * span) ** 2, (0.03 * span) ** 2, []
    for top in range(height - sizes[0] + 1):
        for left in range(width - sizes[1] + 1):
            a = x[top : top + sizes[0], left : left + sizes[1]]
            b = y[top : top + sizes[0], left : left + sizes[1]]
            ma, mb = (weights * a).sum(), (weights * b).sum()
            va, vb = (weights * (a - ma) ** 2).sum(), (weights * (b - mb) ** 2).sum()
            cov = (weights * (a - ma) * (b - mb)).sum()
            found.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return np.mean(found)


@pytest.mark.parametrize("shape", [(1, 8, 9), (3, 32, 20), (1, 1, 13), (2, 5, 4)])
def test_it_is_the_definition(shape):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(4, *shape, generator=generator) for _ in range(2))
    found = structural_similarity(x, y, span=1.0)
    for example in range(4):
        channels = [
            by_the_book(x[example, c].double().numpy(), y[example, c].double().numpy(), 1.0) for c in range(shape[0])
        ]
        assert float(found[example]) == pytest.approx(np.mean(channels), abs=1e-9)


def test_equal_images_are_alike_and_others_less_so():
    images = torch.rand(3, 1, 16, 12, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(2))
    same, near, far = (structural_similarity(images + sigma * noise, images, span=1.0) for sigma in (0.0, 0.1, 1.0))
    assert torch.allclose(same, torch.ones(3, dtype=torch.float64))
    assert (far < near).all()
    assert (near < 1).all()
    assert (structural_similarity(1 - images, images, span=1.0) < 0).all()
