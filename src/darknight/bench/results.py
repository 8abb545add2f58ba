"""Everything that `darknight bench` found, as JSON for scripts and as ratios for a history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from darknight.bench.bandwidth import Bandwidth
from darknight.bench.ceiling import Ceiling
from darknight.bench.passes import Passes
from darknight.bench.peak import Memory
from darknight.bench.rival import Rivals
from darknight.bench.roofline import Roofline, roofline_of
from darknight.ops.place import STRUCTURE

NO_RIVALS = (
    "not measured: give --rivals the Python of an environment that has CrypTen and TenSEAL (docs/performance.md)"
)


@dataclass(frozen=True, kw_only=True)
class Results:
    """None or empty: what was not asked for. overheads: by the name of the scheme, training steps."""

    machine: Mapping[str, Any]
    program: Mapping[str, Any]
    ceilings: Sequence[Ceiling] = ()
    overheads: Mapping[str, Sequence[Ceiling]]
    passes: Passes | None = None
    bandwidth: Bandwidth | None = None
    memory: Sequence[Memory] = ()
    rivals: Rivals | None = None

    def rooflines(self) -> list[tuple[Ceiling, Roofline]]:
        if self.bandwidth is None:
            return []
        return [(each, roofline_of(each, self.bandwidth)) for each in self.ceilings]

    def words(self) -> dict[str, Any]:
        """ratios first: ceiling.LINKS.PASS.MODEL, overhead.SCHEME.MODEL, rival.NAME, kernels.NAME, memory.MODEL.

        roofline and breakdown say what the ceilings are made of, details what the others are: seconds and bytes.
        """
        rival = self.rivals
        return {
            "ceiling": _tree({_place(each): each.ratio for each in self.ceilings}),
            "overhead": _tree({(name, key(each.model)): each.wall for name, each in self._overheads()}),
            "rival": {
                "crypten": rival.crypten if rival else None,
                "tenseal": rival.tenseal if rival else None,
                "absent": _absent(rival),
            },
            "kernels": _kernels(self.passes),
            "memory": {key(each.model): each.ratio for each in self.memory},
            "roofline": _tree({_place(each): _limits(limits) for each, limits in self.rooflines()}),
            "breakdown": _tree({_place(each): _parts(each) for each in self.ceilings}),
            "details": {
                "overhead": _tree({(name, key(each.model)): _passing(each) for name, each in self._overheads()}),
                "memory": {key(each.model): each.words() for each in self.memory},
                "rival": rival.words() if rival else None,
                "bandwidth": asdict(self.bandwidth) if self.bandwidth else None,
            },
            "machine": dict(self.machine),
            "program": dict(self.program),
        }

    def ratios(self) -> tuple[dict[str, float], dict[str, str]]:
        """Each ratio by its path in the JSON, and how it was measured."""
        found: dict[str, tuple[float | None, str]] = {}
        for each in self.ceilings:
            found[".".join(("ceiling", *_place(each)))] = (each.ratio, _conditions(each))
        for name, each in self._overheads():
            found[f"overhead.{name}.{key(each.model)}"] = (each.wall, _conditions(each))
        for kept in self.memory:
            found[f"memory.{key(kept.model)}"] = (kept.ratio, f"batch {kept.batch}, {kept.size}x{kept.size}")
        if self.passes:
            for name, value in _kernels(self.passes).items():
                found[f"kernels.{name}"] = (value, f"{self.passes.nbytes} bytes")
        if self.rivals:
            for name, value in (("crypten", self.rivals.crypten), ("tenseal", self.rivals.tenseal)):
                found[f"rival.{name}"] = (value, f"batch {self.rivals.batch}")
        known = {path: (value, how) for path, (value, how) in found.items() if value is not None}
        return {path: value for path, (value, _) in known.items()}, {path: how for path, (_, how) in known.items()}

    def _overheads(self) -> list[tuple[str, Ceiling]]:
        return [(name, each) for name, found in self.overheads.items() for each in found]


def key(model: str) -> str:
    """A model's name as torchvision writes it."""
    return model.replace("-", "_")


def _place(found: Ceiling) -> tuple[str, str, str]:
    return found.links, "train" if found.training else "infer", key(found.model)


def _conditions(found: Ceiling) -> str:
    placed = "" if found.place == STRUCTURE else f", placed by {found.place}"
    return f"batch {found.batch}, {found.size}x{found.size}{placed}"


def _absent(rivals: Rivals | None) -> str | None:
    if rivals is None:
        return NO_RIVALS
    contests = (*rivals.training.values(), rivals.inference)
    return next((contest.absent for contest in contests if contest.absent), None)


def _kernels(passes: Passes | None) -> dict[str, float | None]:
    return {
        "encode_over_copy": passes.encode_over_copy if passes else None,
        "decode_over_copy": passes.decode_over_copy if passes else None,
    }


def _parts(found: Ceiling) -> dict[str, Any]:
    return {
        "batch": found.batch,
        "size": found.size,
        "times": found.times,
        "place": found.place,
        "masked_layers": len(found.masked),
        "plain": {"seconds": found.plain, "layout": found.layout},
        "enclave": {"seconds": found.enclave, "phases": dict(found.phases), "layers": dict(found.layers)},
        "masked_layers_seconds": {"measured": found.masked_seconds, "expected_by_rates": found.expected},
        **_passing(found),
    }


def _passing(found: Ceiling) -> dict[str, float]:
    """times_p_over_k: the overhead over P/K, the work of all workers over that of the plain step."""
    return {
        "wall_over_plain": found.wall,
        "processors_over_plain": found.processors,
        "times_p_over_k": found.wall * found.scheme.inputs / found.scheme.workers,
    }


def _limits(limits: Roofline) -> dict[str, Any]:
    return {
        "ceiling_at_the_limit_of_memory": limits.ceiling,
        "ceiling_if_passes_were_joined": limits.joined,
        "least_seconds": limits.least,
        "measured_seconds": limits.measured,
        "measured_over_least": limits.measured / limits.least,
        "phases": {
            name: {
                "read_bytes": limit.moved.read,
                "written_bytes": limit.moved.written,
                "least_seconds": limit.least,
                "measured_seconds": limit.measured,
                "measured_over_least": limit.over,
            }
            for name, limit in limits.phases.items()
        },
    }


def _tree(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Nested objects from paths."""
    root: dict[str, Any] = {}
    for path, value in leaves.items():
        branch = root
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = value
    return root
