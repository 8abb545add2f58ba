"""The paper's theorems as printed, and where they fail."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from darknight.accounting import entropy, gaussian_information, lemma_1, lemma_2, theorem_1, theorem_2, worst_coalition
from darknight.coding.systematic import real_systematic

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())

distributions = st.dictionaries(st.integers(-5, 5), st.floats(0.01, 1), min_size=1, max_size=6).map(
    lambda weights: {key: value / sum(weights.values()) for key, value in weights.items()}
)


@pytest.mark.parametrize("row", VECTORS["theorem_1"], ids=lambda row: row["noise"])
def test_the_papers_table_prints_twice_its_theorem(row):
    found = theorem_1(row["inputs"], row["bound"], row["ratio"], math.sqrt(row["variance"]))
    assert found == pytest.approx(row["theorem"])
    assert row["printed"] == pytest.approx(2 * found)


@pytest.mark.parametrize("row", VECTORS["theorem_1"], ids=lambda row: row["noise"])
def test_the_papers_leakage_column_beside_ours(row, capsys):
    """At the paper's own settings: what it prints, what its theorem says, what the systematic code leaks at most."""
    std = math.sqrt(row["variance"])
    mixings = real_systematic(row["inputs"], 1, 0, True).masking
    ours = max(worst_coalition(mixing, bound=row["bound"], noise_std=std)[1] for mixing in mixings)
    theorem = theorem_1(row["inputs"], row["bound"], row["ratio"], std)
    with capsys.disabled():
        print(
            f"\n{row['noise']:<14} printed {row['printed']:.3g}, theorem {theorem:.3g}, ours {ours:.4g} nats a scalar"
        )
    assert ours == pytest.approx(row["ours"], rel=1e-6)
    assert theorem == pytest.approx(20 * ours, rel=1e-6)
    assert row["printed"] == pytest.approx(40 * ours, rel=1e-6)


@pytest.mark.parametrize("case", VECTORS["theorem_2_counterexample"]["cases"], ids=["identity", "sum and difference"])
def test_theorem_2_has_a_counterexample(case):
    """Noise of full rank with rows and columns of norm about 1 leaks nats where the theorem states 2e-8."""
    vector = VECTORS["theorem_2_counterexample"]
    noise = torch.tensor(vector["noise_rows"], dtype=torch.float64)
    noise[1, 0] = math.sqrt(1 - noise[1, 1] ** 2)
    data = torch.tensor(case["data_rows"], dtype=torch.float64)
    std = math.sqrt(vector["variance"])
    assert torch.linalg.matrix_rank(noise) == 2
    assert theorem_2([vector["bound"] ** 2] * 2, 1.0, std) == pytest.approx(vector["stated"])
    leaked = gaussian_information(data, noise, vector["bound"] ** 2 * torch.eye(2, dtype=torch.float64), std)
    assert leaked == pytest.approx(case["nats"], abs=0.005)


def test_the_systematic_code_leaks_twenty_times_less_than_the_papers_bound():
    vector = VECTORS["systematic_against_paper"]
    std = math.sqrt(vector["variance"])
    code = real_systematic(vector["inputs"], 1, 0, True)
    ours = max(worst_coalition(mixing, bound=1.0, noise_std=std)[1] for mixing in code.masking)
    assert ours == pytest.approx(vector["ours"], rel=1e-6)
    assert theorem_1(vector["inputs"], 1.0, 10.0, std) / ours == pytest.approx(vector["times_less"], rel=1e-6)


@given(distributions, distributions)
def test_lemma_1_a_sum_is_at_least_as_uncertain_as_its_parts(first, second):
    of_sum, largest = lemma_1(first, second)
    assert of_sum >= largest - 1e-12


def test_lemma_1_needs_independence():
    """X + Y with Y = -X has no entropy: the inequality is not true by construction."""
    die = dict.fromkeys(range(1, 7), 1 / 6)
    assert entropy({0: 1.0}) == 0 < lemma_1(die, die)[1]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=5), st.floats(1, 1e4))
def test_lemma_2_is_the_gaussian_channel(variances, noise_std):
    exact, bound = lemma_2(variances, noise_std)
    diagonal = torch.diag(torch.tensor(variances, dtype=torch.float64))
    one = torch.eye(len(variances), dtype=torch.float64)
    assert exact == pytest.approx(gaussian_information(one, one, diagonal, noise_std), abs=1e-9)
    assert exact <= bound + 1e-12
