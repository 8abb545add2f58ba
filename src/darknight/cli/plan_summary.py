"""A plan as nested objects of plain values: what `darknight plan --json` prints, and its tables show."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from darknight import __version__
from darknight.cli.scheme_options import scheme_words
from darknight.coding import Field, Scheme, group_count
from darknight.ops.place import STRUCTURE
from darknight.plan import Choice, LayerPlan, Plan, Request, Spares, Totals, Traffic

_VISIBLE = {
    True: "weights, shapes, counts and timing, and so the aggregate gradient of every step (SECURITY.md)",
    False: "weights, shapes, counts and timing (SECURITY.md)",
}


def plan_summary(plan: Plan, file: Path | None) -> dict[str, Any]:
    """file: of the fleet, if there is one."""
    request, scheme = plan.request, plan.scheme
    return {
        "version": __version__,
        "work": {
            "model": request.model,
            "shape": list(request.shape),
            "classes": request.classes,
            "training": request.training,
            "batch_size": request.batch_size,
            "examples": request.examples,
            "epochs": request.epochs,
        },
        "fleet": {
            "file": None if file is None else str(file),
            "operators": dict(Counter(request.operators)),
            "workers": len(request.operators),
            "usable": request.usable_workers,
            "local": request.local,
            "used": scheme.workers,
            "standbys": plan.standbys,
        },
        "target": {
            "colluders": request.colluders,
            "leakage_nats": request.leakage_target,
            "arithmetic": request.arithmetic,
            "integrity": request.integrity,
            "spares": request.spares,
            "most_inputs": request.max_inputs,
            "place": request.place,
        },
        "scheme": scheme_words(scheme),
        "spares": _spares(plan.spares),
        "objective": "wall time" if request.prices is None else "cost",
        "considered": plan.considered,
        "next_best": [_choice(choice) for choice in plan.next_best],
        "layers": [_layer(layer) for layer in plan.layers],
        "operations": [asdict(operation) for operation in plan.operations],
        "step": _totals(plan.step),
        "run": _totals(plan.run),
        "leakage": _leakage(plan),
        "not_covered": [*scheme.caveats, *_batch_norm(plan), *_batch_of_one(request), _VISIBLE[request.training]],
        "memory": {
            "worker_bytes": plan.memory.worker,
            "worker_keeps_bytes": plan.memory.worker_keeps,
            "enclave_at_least_bytes": plan.memory.enclave_at_least,
        },
        "hours": plan.run.seconds.total / 3600,
        "hours_in_the_enclave_alone": plan.alone_seconds / 3600,
        "cost": plan.money,
        "assumptions": {
            "speeds": asdict(request.speeds),
            "unreliable": request.unreliable,
            "prices": None if request.prices is None else asdict(request.prices),
            "rates": None if request.rates is None else asdict(request.rates),
            "words": _assumptions(request),
        },
        "command": _command(plan, file),
    }


def _spares(spares: Spares) -> dict[str, Any]:
    return {"count": spares.count, "reason": spares.reason, "others": [_choice(choice) for choice in spares.others]}


def _choice(choice: Choice) -> dict[str, Any]:
    return {"scheme": scheme_words(choice.scheme), "hours": choice.seconds.total / 3600, "cost": choice.money}


def _layer(layer: LayerPlan) -> dict[str, Any]:
    words: dict[str, Any] = {"name": layer.name, "kind": layer.kind, "where": layer.where, "why": layer.why}
    if layer.form is None:
        return words
    return {
        **words,
        "input_shape": list(layer.form.input_shape),
        "output_shape": list(layer.form.output_shape),
        "weight_shape": list(layer.form.weight_shape),
        "groups": layer.form.op.groups,
        "shares": layer.shares,
        "traffic": _traffic(layer.traffic),
        "worker_flops": layer.worker_flops,
        "enclave_flops": layer.enclave_flops,
        "nats_a_call": layer.nats,
    }


def _traffic(traffic: Traffic) -> dict[str, int]:
    return {"sent_bytes": traffic.sent, "received_bytes": traffic.received, **asdict(traffic)}


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "steps": totals.steps,
        "maskings": totals.maskings,
        "traffic": _traffic(totals.traffic),
        "worker_flops": totals.worker_flops,
        "enclave_flops": totals.enclave_flops,
        "nats_per_example": totals.nats,
        "seconds": {"total": totals.seconds.total, **asdict(totals.seconds)},
    }


def _leakage(plan: Plan) -> dict[str, Any]:
    times, noise = plan.request.epochs, plan.noise
    hands = f"any {_count(plan.scheme.colluders, 'worker')}"
    if isinstance(plan.scheme.arithmetic, Field):
        words = f"0 nats from the shares of {hands}, in every layer and step"
    else:
        often = f"{_count(times, 'time')}, once an epoch" if plan.request.training else "once"
        words = (
            f"at most {plan.run.nats:.3g} nats about one example to {hands}: it is sent {often}, and each time "
            f"leaks {plan.step.nats:.3g}, which is {noise.input:.3g} for each number of a layer's input"
        )
        words += f" and {noise.gradient:.3g} for each of its gradient" if plan.request.training else ""
    return {
        "nats_per_example": plan.run.nats,
        "bits_per_example": plan.run.nats / math.log(2),
        "nats_per_number": asdict(noise),
        "nats_about_its_batches": plan.run.nats * _groups(plan),
        "times_sent": times,
        "words": words,
    }


def _batch_norm(plan: Plan) -> list[str]:
    """In training it mixes examples. The bound about a whole batch covers that: every virtual batch counts."""
    mixes = plan.request.training and any(layer.kind.startswith("BatchNorm") for layer in plan.layers)
    if not plan.run.nats or not mixes:
        return []
    return [
        "what batch norm carries of an example into the shares of others in its batch; about the whole batches that it "
        f"was in, the bound is {plan.run.nats * _groups(plan):.3g} nats"
    ]


def _groups(plan: Plan) -> int:
    return group_count(plan.request.batch_size, plan.scheme.inputs)


def _batch_of_one(request: Request) -> list[str]:
    alone = request.training and 1 in request.batches()
    return ["a batch of one: the step shows that example's gradient; choose another batch size"] if alone else []


def _assumptions(request: Request) -> list[str]:
    speeds = request.speeds
    found = [
        f"a worker: {speeds.worker_gflops:g} GFLOP/s in float64",
        f"its line: {speeds.link_gbits:g} Gbit/s, all lines at once",
        f"masking, unmasking and checking: {speeds.masking_gbytes:g} GB/s of shares",
        f"torch in the enclave: {speeds.memory_gbytes:g} GB/s, {speeds.enclave_gflops:g} GFLOP/s in float32",
        f"any pass: {speeds.pass_ms:g} ms",
        f"{request.unreliable:g} of all answers missing, which takes {speeds.notice_ms:g} ms to notice",
        "no retries after overflow",
    ]
    whose = "workers on this machine" if request.local else "workers on other machines"
    found += [f"where layers are cheaper: this machine's speed, {whose}"] if request.rates is not None else []
    return [*found, "no evaluation after an epoch"] if request.training else found


def _command(plan: Plan, file: Path | None) -> str:
    """What to run. The data is the user's to say."""
    request, scheme = plan.request, plan.scheme
    words = ["darknight", "train" if request.training else "infer"]
    if request.training:
        words += ["--model", request.model, "--epochs", str(request.epochs)]
    words += ["--batch-size", str(request.batch_size), *_scheme_flags(scheme)]
    words += ["--place", request.place] if request.training and request.place != STRUCTURE else []
    return shlex.join(words if file is None else [*words, "--fleet", str(file)])


def _scheme_flags(scheme: Scheme) -> list[str]:
    flags = ["--inputs", str(scheme.inputs), "--colluders", str(scheme.colluders)]
    flags += ["--spares", str(scheme.spares)] if scheme.spares else []
    flags += ["--integrity", scheme.integrity] if scheme.integrity != "freivalds" else []
    if not isinstance(scheme.arithmetic, Field):
        flags += ["--arithmetic", "real", "--noise-std", f"{scheme.arithmetic.noise_std:g}"]
    return flags


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s'[: number != 1]}"
