"""Our row of the paper's Table 1. Every cell names tests that show it, a "no" too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Feature:
    """mark: y, n, or ? for what was written and tested but never measured. tests: file::name, from the root."""

    mark: str
    why: str
    tests: tuple[str, ...]


# By the names of paper_quotes.FEATURES.
OURS: Mapping[str, Feature] = {
    "training": Feature(
        mark="y",
        why="The same weights as without workers, close to plain training.",
        tests=(
            "tests/runtime/test_bit_identity.py::test_workers_and_enclave_train_the_same_weights",
            "tests/runtime/test_bit_identity.py::test_training_is_close_to_plain_training",
        ),
    ),
    "inference": Feature(
        mark="y",
        why="darknight infer, with K + M workers.",
        tests=("tests/cli/test_infer.py::test_a_labelled_set",),
    ),
    "differential privacy": Feature(
        mark="n",
        why="Workers see the weights before and after a step: gradients of small batches can be inverted.",
        tests=(
            "tests/audit/test_recorded_attacks.py::test_small_batches_are_inverted_and_the_size_of_a_batch_matters",
        ),
    ),
    "multi-party computation": Feature(
        mark="n",
        why="Workers know nothing of each other; the enclave alone masks and unmasks.",
        tests=("tests/boundaries/test_imports.py::test_the_table_itself_keeps_the_worker_apart_and_has_no_cycles",),
    ),
    "homomorphic encryption": Feature(
        mark="n",
        why="Shares are masked and not encrypted under a key: all of them together hold the data.",
        tests=("tests/runtime/test_privacy.py::test_all_transcripts_together_hold_the_data",),
    ),
    "trusted hardware": Feature(
        mark="y",
        why="Keys go only to evidence of SGX, TDX or SEV-SNP with a known measurement. On a machine of your own none "
        "is needed; no enclave of real hardware was at hand for these measurements.",
        tests=(
            "tests/trust/test_verify.py::test_no_keys_without_a_measurement",
            "tests/packaging/test_enclave_manifest.py::test_the_manifest_keeps_every_rule",
        ),
    ),
    "data privacy": Feature(
        mark="y",
        why="What any M workers receive is uniform, whatever the data; gradients too, which the paper sends in the "
        "clear.",
        tests=(
            "tests/runtime/test_privacy.py::test_every_workers_shares_are_uniform_whatever_the_data",
            "tests/audit/test_recorded_attacks.py::test_gradients_in_the_clear_are_exact_and_masked_ones_are_not",
        ),
    ),
    "model private from client": Feature(
        mark="n",
        why="Departs from the paper: whoever submits a job names the model and gets its weights.",
        tests=("tests/cli/test_submit.py::test_a_job_from_submission_to_result",),
    ),
    "model private from server": Feature(
        mark="n",
        why="Workers get the weights, as in the paper.",
        tests=(
            "tests/audit/test_recorded_attacks.py::test_the_attack_on_updates_uses_the_weights_that_workers_are_sent",
        ),
    ),
    "integrity": Feature(
        mark="y",
        why="Every result is checked in the enclave, also if all workers lie together.",
        tests=(
            "tests/runtime/test_integrity.py::test_one_wrong_element_is_noticed_its_worker_named_and_the_step_right",
            "tests/runtime/test_integrity.py::test_all_workers_wrong_together_are_found_by_freivalds",
        ),
    ),
    "GPU": Feature(
        mark="?",
        why="Workers take --device cuda:N, and what a GPU does otherwise is tested on the processor; no GPU was at "
        "hand, so nobody has timed one.",
        tests=("tests/ops/test_strategy.py::test_the_path_of_a_gpu_gives_the_same_bits",),
    ),
    "large networks": Feature(
        mark="y",
        why="VGG16, ResNet152 and the MobileNets at 224x224, every convolution masked.",
        tests=(
            "tests/models/test_protected.py::test_every_convolution_and_linear_layer_is_masked",
            "tests/models/test_full_size.py::test_a_training_step_and_an_inference_batch",
        ),
    ),
}
