"""darknight plan: tables for people, JSON for scripts, and for the impossible what would make it possible."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from darknight.cli.app import run
from darknight.cli.scheme_options import Arithmetic, SchemeOptions
from darknight.ops.cost import Rates
from darknight.wire.identity import WORKER, Identity


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)

    def command(arguments=""):
        code = run(["plan", *arguments.split()])
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return command


def refused(done, code):
    """What the command says before it gives up."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("darknight: error: ")
    return line


def planned(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_fleet(*operators):
    entries = [
        f"[[worker]]\naddress = 'host{number}:7001'\noperator = '{operator}'\n"
        f"certificate = '''{Identity.create(WORKER).certificate.decode()}'''\n"
        for number, operator in enumerate(operators)
    ]
    Path("fleet.toml").write_text("\n".join(entries))


def test_the_tables_fit_the_terminal_and_say_what_json_says(here, monkeypatch):
    flags = "--model mobilenet-v2 --shape 3x64x80 --classes 100 --worker-price 0.5 --workers 7"
    found = planned(here(f"{flags} --json"))
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        done = here(flags)
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= columns
    text = " ".join(done.stdout.replace("│", " ").split())
    for words in (
        "Masked, in a step (36 layers): a product with public weights",
        "Products in the enclave, in a step (17 layers)",
        "features.1.conv.0.0 and 16 more",
        "In the enclave, in a step: cheap, and not a product",
        "batch norm",
        "training of mobilenet-v2, 1,437 examples of 3x64x80, 8 epochs, batches of 64",
        f"K={found['scheme']['inputs']} inputs, M=1 colluders, E=0 spares: {found['scheme']['workers']} workers",
        f"the least cost of {found['considered']} schemes",
        "7 workers, each of another operator",
        "0 nats from the shares of any 1 worker",
        f"{found['cost']:,.2f}: " if found["cost"] >= 1 else f"{found['cost']:.3g}: ",
        "time (estimate)",
        "cost (estimate)",
        "a worker: 26 GFLOP/s in float64; its line: 2.6 Gbit/s",
        f"{found['command']} (and your --data)",
    ):
        assert words in text, words
    rows = {line.split("│")[1].split()[0]: line for line in done.stdout.splitlines() if line.startswith("│ features")}
    assert rows["features.0.0"].split("│")[2].strip() == str(found["scheme"]["workers"])


def test_the_table_says_when_workers_do_not_pay(here):
    words = "in the enclave alone, in the clear: faster than with workers, at these speeds"
    for flags, slower in (("", True), ("--enclave-gflops 0.001", False)):
        done = here(flags)
        text = " ".join(done.stdout.replace("│", " ").split())
        assert "in the enclave alone, in the clear" in text
        assert (words in text) is slower


def test_json_adds_up(here):
    found = planned(here("--model resnet-small --shape 3x32x24 --workers 7 --spares 1 --json"))
    masked = [layer for layer in found["layers"] if layer["where"] == "masked"]
    enclave = [layer for layer in found["layers"] if layer["where"] == "enclave"]
    assert (len(masked), len(enclave)) == (10, 9)
    assert {layer["why"] for layer in enclave} == {"cheap, and not a product"}
    for part in ("sent_bytes", "received_bytes", "weights", "gradient_shares"):
        assert sum(layer["traffic"][part] for layer in masked) == found["step"]["traffic"][part]
    assert sum(layer["worker_flops"] for layer in masked) == found["step"]["worker_flops"]
    own = sum(layer["enclave_flops"] for layer in masked) + sum(each["flops"] for each in found["operations"])
    assert own == found["step"]["enclave_flops"]
    assert found["fleet"]["used"] == found["scheme"]["workers"] == 7
    assert found["scheme"]["spares"] == 1
    assert found["run"]["steps"] == 8 * 23
    assert found["hours"] == pytest.approx(found["run"]["seconds"]["total"] / 3600)
    parts = found["run"]["seconds"]
    assert parts["total"] == pytest.approx(sum(seconds for name, seconds in parts.items() if name != "total"))
    assert parts["repeats"] > 0
    assert (found["cost"], found["objective"]) == (None, "wall time")
    assert found["memory"]["worker_keeps_bytes"] < found["memory"]["worker_bytes"]


def products(found, where):
    return [layer for layer in found["layers"] if layer["where"] == where and "enclave_flops" in layer]


def test_products_that_stay_are_listed_with_their_reason_and_add_up(here):
    flags = "--model mobilenet-small --shape 3x32x24 --json"
    found, all_sent = planned(here(flags)), planned(here(f"{flags} --place workers"))
    kept = products(found, "enclave")
    assert {layer["why"] for layer in kept} == {"depthwise: cheaper to compute than to mask and check"}
    assert {layer["groups"] > 1 for layer in kept} == {True}
    assert (len(kept), len(products(found, "masked"))) == (7, 16)
    assert (len(products(all_sent, "enclave")), len(products(all_sent, "masked"))) == (0, 23)
    assert all(layer["traffic"]["sent_bytes"] == layer["shares"] == 0 for layer in kept)
    for each in (found, all_sent):
        own = sum(layer.get("enclave_flops", 0) for layer in each["layers"]) + sum(
            operation["flops"] for operation in each["operations"]
        )
        assert own == each["step"]["enclave_flops"]
    names = {layer["name"] for layer in kept}
    apart = sum(layer["traffic"]["sent_bytes"] for layer in all_sent["layers"] if layer["name"] in names)
    sent = [each["step"]["traffic"]["sent_bytes"] for each in (all_sent, found)]
    assert sent[0] - sent[1] == apart > 0
    assert found["hours_in_the_enclave_alone"] == all_sent["hours_in_the_enclave_alone"]
    assert found["hours"] < all_sent["hours"]
    assert "--place" not in found["command"]
    assert all_sent["command"].endswith("--place workers")


def test_by_cost_this_machine_is_measured(here, monkeypatch):
    """With rates of a machine that nobody has: all is cheaper there, or nothing is."""
    flags = "--model mobilenet-small --shape 3x32x24 --place cost"
    free = dict.fromkeys(Rates.__dataclass_fields__, 0.0)
    dear = {name: {**free, **rates} for name, rates in (("here", {"call": 1.0}), ("there", {"product": 1.0}))}
    for name, expected in (("here", (23, 0)), ("there", (0, 23))):
        monkeypatch.setattr("darknight.cli.plan.measured_rates", lambda name=name: Rates(**dear[name]))
        done = here(flags)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
        found = planned(here(f"{flags} --json"))
        assert (len(products(found, "enclave")), len(products(found, "masked"))) == expected
        assert found["assumptions"]["rates"] == dear[name]
        assert found["command"].endswith("--place cost")
        assert ("Masked, in a step" in done.stdout) == (name == "there")
        assert ("than to mask and check (2" in " ".join(done.stdout.replace("│", " ").split())) == (name == "here")
    monkeypatch.undo()
    assert planned(here(f"{flags} --json"))["assumptions"]["rates"]["copy"] > 0


def test_workers_on_other_machines_get_less_than_local_ones(here, monkeypatch):
    """A byte that is sealed costs a second, a multiplication next to nothing, and all else nothing."""
    rates = Rates(**{**dict.fromkeys(Rates.__dataclass_fields__, 0.0), "product": 1e-9, "grouped": 1e-9, "link": 1.0})
    monkeypatch.setattr("darknight.cli.plan.measured_rates", lambda: rates)
    flags = "--model mobilenet-small --shape 3x32x24 --place cost --json"
    far, near = planned(here(flags)), planned(here(f"{flags} --local"))
    assert (far["fleet"]["local"], near["fleet"]["local"]) == (False, True)
    assert not products(far, "masked")
    assert products(near, "masked")
    assert any("workers on other machines" in words for words in far["assumptions"]["words"])
    assert any("workers on this machine" in words for words in near["assumptions"]["words"])


def test_real_arithmetic_within_a_target(here):
    found = planned(here("--arithmetic real --leakage-target 0.5 --epochs 3 --json"))
    noise = found["scheme"]["arithmetic"]["noise_std"]
    assert 0.49 < found["leakage"]["nats_per_example"] <= 0.5
    assert found["leakage"]["nats_per_example"] == pytest.approx(3 * found["step"]["nats_per_example"])
    assert sum(layer["nats_a_call"] for layer in found["layers"] if layer["where"] == "masked") == pytest.approx(
        found["step"]["nats_per_example"]
    )
    assert f"--arithmetic real --noise-std {noise:g}" in found["command"]
    # Batch norm mixes the 16 virtual batches of a step: their bounds together cover that.
    assert found["leakage"]["nats_about_its_batches"] == pytest.approx(16 * found["leakage"]["nats_per_example"])
    assert any("batch norm" in each for each in found["not_covered"])
    alone = planned(here("--model mlp --arithmetic real --leakage-target 0.5 --json"))
    assert not any("batch norm" in each for each in alone["not_covered"])
    done = here("--arithmetic real --leakage-target 0.5 --epochs 3")
    text = " ".join(done.stdout.replace("│", " ").split())
    assert f"real arithmetic, noise {noise:g} times the largest input" in text
    assert "it is sent 3 times, once an epoch" in text
    assert "(target: 0.5)" in text


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--inference",
        "--arithmetic real --leakage-target 1",
        "--spares 2",
        "--unreliable 0.2",
        "--inference --integrity parity",
    ],
)
def test_the_command_that_it_ends_with_makes_the_same_scheme(here, flags):
    found = planned(here(f"{flags} --json"))
    words = found["command"].split()
    assert words[:2] == ["darknight", "infer" if "inference" in flags else "train"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    scheme = SchemeOptions(
        arithmetic=Arithmetic(given.get("--arithmetic", "field")),
        inputs=int(given["--inputs"]),
        colluders=int(given["--colluders"]),
        spares=int(given.get("--spares", 0)),
        noise_std=float(given["--noise-std"]) if "--noise-std" in given else None,
        integrity=given.get("--integrity"),
    ).scheme()
    scheme = scheme.for_inference() if "inference" in flags else scheme
    assert scheme.workers == found["scheme"]["workers"]
    assert (scheme.spares, scheme.integrity) == (found["scheme"]["spares"], found["scheme"]["integrity"])
    if "real" in flags:
        assert scheme.arithmetic.noise_std == found["scheme"]["arithmetic"]["noise_std"]


def test_spares_are_chosen_and_explained(here):
    few = planned(here("--json"))
    many = planned(here("--unreliable 0.1 --json"))
    assert (few["scheme"]["spares"], few["target"]["spares"], few["assumptions"]["unreliable"]) == (0, None, 0.001)
    assert many["scheme"]["spares"] == many["spares"]["count"] == 1
    assert many["fleet"]["used"] == many["scheme"]["inputs"] + 2 + 1
    assert [other["scheme"]["spares"] for other in many["spares"]["others"]] == [0, 2]
    assert all(other["hours"] > many["hours"] for other in many["spares"]["others"])
    assert "--spares 1" in many["command"]
    text = " ".join(here("--unreliable 0.1").stdout.replace("│", " ").split())
    assert f"spares 1: {many['spares']['reason']}; with 0: " in text
    assert "asking again" in text
    assert "0.1 of all answers missing, which takes 0 ms to notice" in text
    asked = planned(here("--unreliable 0.1 --spares 0 --json"))
    assert (asked["scheme"]["spares"], asked["spares"]["reason"]) == (0, "as asked for")
    parity = planned(here("--inference --integrity parity --json"))
    assert (parity["scheme"]["spares"], parity["scheme"]["integrity"]) == (1, "parity")


def test_a_fleet_file_with_operators(here):
    write_fleet("north", "north", "south", "east", "west")
    found = planned(here("--fleet fleet.toml --json"))
    assert found["fleet"]["operators"] == {"north": 2, "south": 1, "east": 1, "west": 1}
    assert (found["fleet"]["workers"], found["fleet"]["usable"], found["fleet"]["used"]) == (5, 4, 4)
    assert found["command"].endswith("--fleet fleet.toml")
    text = " ".join(here("--fleet fleet.toml").stdout.replace("│", " ").split())
    assert "north (2), south (1), east (1), west (1); 1 of no use, as one operator holds at most 1 share" in text


def test_operators_by_name_and_number(here):
    found = planned(here("--operators north:2,south,east:2 --colluders 2 --json"))
    assert found["fleet"]["operators"] == {"north": 2, "south": 1, "east": 2}
    assert found["fleet"]["used"] == 5


def test_settings_come_from_the_file_too(here, monkeypatch):
    Path("darknight.toml").write_text('[plan]\nmodel = "mlp"\nworkers = 5\nworker-price = 2.0\n')
    assert planned(here("--json"))["fleet"]["workers"] == 5
    monkeypatch.setenv("DARKNIGHT_PLAN_WORKERS", "4")
    found = planned(here("--json"))
    assert (found["fleet"]["workers"], found["assumptions"]["prices"]["worker"]) == (4, 2.0)


# --- the impossible: the advice is taken from what the command printed, and then it works -----------------------------
@pytest.mark.parametrize(
    ("flags", "pattern", "then"),
    [
        ("--workers 2", r"(\d+) more worker", lambda n: f"--workers {2 + int(n)}"),
        ("--workers 4 --colluders 3", r"(\d+) more worker", lambda n: f"--workers {4 + int(n)} --colluders 3"),
        ("--workers 4 --colluders 3", r"colluders=(\d+)[;.]", lambda n: f"--workers 4 --colluders {n}"),
        ("--workers 4 --spares 3", r"spares=(\d+)\.", lambda n: f"--workers 4 --spares {n}"),
        (
            "--inference --integrity both --spares 0",
            r"spares=(\d+)\.",
            lambda n: f"--inference --integrity both --spares {n}",
        ),
        (
            "--operators north:6",
            r"same 6 workers spread over (\d+) operators",
            lambda n: "--operators " + ",".join(f"o{place % int(n)}" for place in range(6)),
        ),
        (
            "--arithmetic real --leakage-target 1e-12",
            r"a leakage target of (\S+)\.$",
            lambda target: f"--arithmetic real --leakage-target {target}",
        ),
        (
            "--arithmetic real --leakage-target 1e-6 --epochs 1000",
            r"epochs=(\d+)",
            lambda n: f"--arithmetic real --leakage-target 1e-6 --epochs {n}",
        ),
        (
            "--arithmetic real --leakage-target 0",
            r"arithmetic=(field)",
            lambda name: f"--arithmetic {name} --leakage-target 0",
        ),
    ],
)
def test_the_impossible_says_what_would_be_possible(here, flags, pattern, then):
    line = refused(here(flags), 1)
    assert "It is possible with " in line
    (advice,) = re.findall(pattern, line.split("It is possible with ")[1])
    assert planned(here(f"{then(advice)} --json"))["scheme"]


def test_an_image_that_is_too_small_says_for_what_it_is_enough(here):
    line = refused(here("--model vgg16 --shape 3x16x16"), 2)
    assert "images of 16x16; vgg16 needs 32x32 or more." in line
    other = re.findall(r"use one of (.*)\.$", line)[0].split(", ")[0]
    assert here(f"--model {other} --shape 3x16x16").returncode == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--shape 8x8", "--shape 8x8; needs channels x height x width"),
        ("--model lenet", "unknown model 'lenet'"),
        ("--workers 0", "--workers 0"),
        ("--operators a,,b", "--operators: ''"),
        ("--operators a:0", "--operators: 'a:0'"),
        ("--operators a:x", "--operators: 'a:x'"),
        ("--operators a,b --workers 3", "--operators names 2"),
        ("--fleet fleet.toml --workers 3", "Drop --workers and --operators"),
        ("--fleet nowhere.toml", "nowhere.toml: cannot be read"),
        ("--colluders 0", "colluders 0"),
        ("--spares -1", "spares -1"),
        ("--max-inputs 0", "max inputs 0"),
        ("--arithmetic paper", "arithmetic 'paper'; use one of auto, field, real"),
        ("--arithmetic real", "real arithmetic without a leakage target"),
        ("--leakage-target -1", "leakage target -1"),
        ("--inference --epochs 3", "epochs 3 of an inference"),
        ("--worker-price -1", "worker price -1"),
        ("--link-gbits 0", "link gbits 0"),
        ("--unreliable -0.1", "unreliable -0.1"),
        ("--unreliable 0.6", "unreliable 0.6; needs a share of 1, at most 0.5"),
        ("--notice-ms -1", "notice ms -1"),
        ("--integrity off", "integrity 'off'; use one of freivalds, parity, both"),
        ("--batch-size 0", "batch size 0"),
        ("--place cloud", "place 'cloud'; use one of structure, cost, workers"),
        ("--colour", "--colour"),
    ],
)
def test_mistakes_are_refused(here, flags, complaint):
    assert complaint in refused(here(flags), 2)


def test_a_batch_of_one_is_said_to_show_a_gradient(here):
    assert any("batch of one" in each for each in planned(here("--examples 65 --json"))["not_covered"])
    assert not any("batch of one" in each for each in planned(here("--examples 66 --json"))["not_covered"])


def test_help_has_examples_that_run_and_the_exit_codes(here):
    done = here("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    text = " ".join(done.stdout.split())
    assert "0 done, 1 the target cannot be met, 2 bad usage, 130 interrupted" in text
    examples = re.findall(r"^ +darknight plan (.*?(?:\\\n.*?)*)$", done.stdout, flags=re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        assert here(example.replace("\\", " ")).returncode == 0
