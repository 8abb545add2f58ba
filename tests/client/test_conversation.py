"""A conversation begins only with the enclave that the policy names, and with the workers that it names."""

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
