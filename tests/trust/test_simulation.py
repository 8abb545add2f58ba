"""The software platform: genuine formats, and a root that nobody trusts by accident."""

import time
from dataclasses import replace

import pytest

from darknight.errors import TrustError
from darknight.trust.policy import Policy
from darknight.trust.simulation import SIMULATED_REGISTERS, Pretence, SoftwarePlatform
from darknight.trust.verify import attested, judge

DATA = bytes(range(64))


def policy_for(platform, **more):
    registers = {number: frozenset({value}) for number, value in enumerate(SIMULATED_REGISTERS)}
    tdx = len(platform.measurement) == 48
    more = {"measurements": frozenset({platform.measurement}), "rtmr": registers if tdx else {}, **more}
    return Policy(insecure_simulated_root=platform.root_certificate, **more)


@pytest.mark.parametrize("format", ["sgx", "tdx"])
def test_its_evidence_holds_with_its_root_and_is_called_simulated(tmp_path, format):
    platform = SoftwarePlatform(tmp_path, pretence=Pretence(format=format))
    found = attested(platform.evidence(DATA), policy=policy_for(platform), now=int(time.time()), report_data=DATA)
    assert found.simulated
    assert found.measurement == platform.measurement
    assert any("SIMULATED" in note for note in found.verdict.notes)


@pytest.mark.parametrize("format", ["sgx", "tdx"])
def test_it_is_refused_under_the_vendors_root(tmp_path, format):
    platform = SoftwarePlatform(tmp_path, pretence=Pretence(format=format))
    evidence, now = platform.evidence(DATA), int(time.time())
    assert not judge(evidence, policy=None, now=now).holds
    without = replace(policy_for(platform), insecure_simulated_root=None)
    with pytest.raises(TrustError, match="refused"):
        attested(evidence, policy=without, now=now, report_data=DATA)
