"""A conversation begins only with the enclave that the policy names, and with the workers that it names."""

import json

import pytest

from darknight.client.conversation import Conversation
from darknight.errors import TrustError
from darknight.trust.fresh import fresh_nonce
from darknight.trust.keys import ClientKey
from darknight.trust.policy import read_policy
from service.offices import CONFIGURATION, furnish, open_office


def test_a_configuration_that_the_policy_does_not_name_is_refused(tmp_path):
    """The evidence holds in both cases: a host may set up the same program with workers of its own."""
    furnish(tmp_path)
    policy = tmp_path / "policy.toml"
    free = policy.read_text()
    with open_office(tmp_path) as office:
        with Conversation(office.address, ClientKey(fresh_nonce()), read_policy(policy)) as conversation:
            mine = conversation.offer.configuration_digest.hex()
            assert conversation.offer.configuration == CONFIGURATION.encode()
        policy.write_text(f'configurations = ["{"00" * 32}", "{mine}"]\n{free}')
        with Conversation(office.address, ClientKey(fresh_nonce()), read_policy(policy)):
            pass
        policy.write_text(f'configurations = ["{"00" * 32}"]\n{free}')
        with pytest.raises(TrustError, match="set up for something else") as caught:
            Conversation(office.address, ClientKey(fresh_nonce()), read_policy(policy))
        assert caught.value.check == "configuration"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (2, "format 2, made by a newer version .* Upgrade DarKnight here. Nothing was released"),
        (0, "format 0, of no version that this one knows"),
        (None, "no number of a format"),
    ],
)
def test_a_configuration_in_another_format_is_refused_with_advice(tmp_path, number, advice):
    """By other rules it could say that its workers are separate where it means that they are not."""
    furnish(tmp_path)
    words = {**json.loads(CONFIGURATION.encode()), "format": number}
    with open_office(tmp_path, configuration=json.dumps(words).encode()) as office:
        with pytest.raises(TrustError, match=advice) as caught:
            Conversation(office.address, ClientKey(fresh_nonce()), read_policy(tmp_path / "policy.toml"))
        assert caught.value.check == "version"
