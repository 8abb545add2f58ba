"""Attacks on the way from a client to its enclave. The host owns disk, network and every reply."""

import random
import shutil

import pytest

from darknight.client.conversation import Conversation
from darknight.client.job_folder import Accepted
from darknight.client.jobs import _brought, submit
from darknight.errors import ServiceError, TrustError, UsageError
from darknight.service.answering import METHODS
from darknight.service.queue import READY, WAITING, Queue
from darknight.service.sealed_data import open_dataset
from darknight.service.sealed_store import SealedStore, newest
from darknight.train import Store
from darknight.trust.fresh import fresh_nonce
from darknight.trust.key_file import DataKey
from darknight.trust.keys import ClientKey, EnclaveKey
from darknight.trust.policy import Policy, read_policy
from darknight.trust.release import JobKeys, Receipt
from darknight.trust.sealing import HEAD, MANIFEST, RECORDS
from darknight.trust.simulation import Pretence, simulated_measurement
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.job_channel import JobChannel, JobServer
from darknight.wire.jobs import ATTEST, CANCEL, FETCH, RELEASE, STATUS, SUBMIT, UPLOAD, WATCH, dump, load
from service.enclaves import OPERATORS, Quiet, opened, place, seal, write_data, write_job, write_policy
from service.offices import CONFIGURATION, furnish, open_office
from train.saved import card, network, train


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    furnish(folder)
    return folder


@pytest.fixture
def home(furnished, tmp_path):
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    write_policy(tmp_path)
    return tmp_path


def talk(home, address, client=None):
    """A conversation as an honest client begins it."""
    return Conversation(address, client or ClientKey(fresh_nonce()), read_policy(home / "policy.toml"))


def brought(home, office, job=None):
    """A job in the queue with all its data, and the conversation that brought it."""
    folder = opened(job or write_job(home))
    conversation = talk(home, office.address, folder.client)
    _brought(folder, conversation, Quiet())
    return folder, conversation


def recorded(conversation, keys):
    """What goes over the wire in a release, and the release itself is not made."""
    sent = []
    conversation._channel.ask, ask = lambda method, message: sent.append(message) or dump({}), conversation._channel.ask
    keys()
    conversation._channel.ask = ask
    return sent[0]


class Between:
    """Answers as the enclave does, but for what `change` makes of its evidence."""

    def __init__(self, real, change):
        self._real, self._change = real, change

    def answer(self, method, message):
        reply = self._real.answer(method, message)
        return dump(self._change(load(reply))) if method == ATTEST else reply

    def stream(self, *arguments):
        return self._real.stream(*arguments)

    def take(self, *arguments):
        return self._real.take(*arguments)


# --- the honest way, so that the refusals below mean something -------------------------------------------------------
def test_an_honest_client_releases_keys_to_an_honest_enclave(home):
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        with conversation:
            assert conversation.attested.simulated
            assert conversation.ask(STATUS, job=folder.text.name)["state"] == WAITING
            assert conversation.release(folder.text, folder.keys, None)["state"] == READY
        entry = office.queue.next(timeout=0)
        assert entry.name == folder.text.name
        assert entry.keys.data.raw == folder.keys.data.raw


# --- nonces and envelopes --------------------------------------------------------------------------------------------
def test_a_nonce_is_attested_once(home):
    with open_office(home) as office:
        channel, nonce = JobChannel(office.address), fresh_nonce()
        channel.ask(ATTEST, dump({"nonce": nonce.hex()}))
        with pytest.raises(ServiceError, match="nonce was used") as caught:
            channel.ask(ATTEST, dump({"nonce": nonce.hex()}))
        assert caught.value.check == "nonce"


def test_a_release_that_is_sent_again_is_refused(home):
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        with conversation:
            message = recorded(conversation, lambda: conversation.release(folder.text, folder.keys, None))
            assert load(conversation._channel.ask(RELEASE, message))["state"] == READY
            with pytest.raises(ServiceError, match="made before") as caught:
                conversation._channel.ask(RELEASE, message)
            assert caught.value.check == "sequence"
            with pytest.raises(ServiceError, match="released in this conversation already"):
                conversation.release(folder.text, folder.keys, None)


def test_an_envelope_of_another_conversation_does_not_open(home):
    """Signed anew by the client itself: the encryption, too, is bound to the nonce."""
    with open_office(home) as office:
        folder, first = brought(home, office)
        sent = []
        first.ask, ask = lambda method, **body: sent.append(body), first.ask
        first.release(folder.text, folder.keys, None)
        first.ask = ask
        with talk(home, office.address, folder.client) as second, pytest.raises(ServiceError) as caught:
            second.ask(RELEASE, **sent[0])
        assert caught.value.check == "envelope"


def test_what_was_recorded_before_a_restart_opens_nothing_after_it(home):
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        with conversation:
            message = recorded(conversation, lambda: conversation.release(folder.text, folder.keys, None))
    with open_office(home) as office, pytest.raises(ServiceError) as caught:
        JobChannel(office.address).ask(RELEASE, message)
    assert caught.value.check == "nonce"


def test_an_envelope_for_another_checkpoint_does_not_open(home):
    """The host says that the client meant another one."""
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        receipt = Receipt(number=3, step=7, digest="0" * 64)
        sent = []
        conversation.ask, ask = lambda method, **body: sent.append(body), conversation.ask
        conversation.release(folder.text, folder.keys, receipt)
        conversation.ask = ask
        with conversation, pytest.raises(ServiceError) as caught:
            conversation.ask(RELEASE, **{**sent[0], "resume": None})
        assert caught.value.check == "envelope"


# --- an enclave that is not the one ----------------------------------------------------------------------------------
def test_the_key_of_another_enclave_is_refused(home):
    """The host puts its own key into the reply, to open the envelope itself."""
    mine = EnclaveKey()
    with (
        open_office(
            home, answering=lambda real: Between(real, lambda reply: {**reply, "key": mine.public.hex()})
        ) as it,
        pytest.raises(TrustError) as caught,
    ):
        talk(home, it.address)
    assert caught.value.check == "report_data"


def test_evidence_of_another_occasion_is_refused(home):
    """Genuine, of the same enclave, for another nonce: swapped report data."""
    old = []

    def change(reply):
        old.append(reply["evidence"])
        return {**reply, "evidence": old[0]}

    with open_office(home, answering=lambda real: Between(real, change)) as office:
        talk(home, office.address)
        with pytest.raises(TrustError) as caught:
            talk(home, office.address)
    assert caught.value.check == "report_data"


def test_another_configuration_than_the_attested_one_is_refused(home):
    """The host shows honest workers, and the enclave has its own."""

    def change(reply):
        return {**reply, "configuration": reply["configuration"].replace("north", "noble")}

    with open_office(home, answering=lambda real: Between(real, change)) as office, pytest.raises(TrustError) as caught:
        talk(home, office.address)
    assert caught.value.check == "report_data"


def test_a_configuration_that_nobody_accepted_is_asked_about_again(home):
    """Attested, but not what the user said yes to before."""
    job = write_job(home)
    folder = opened(job)
    folder.accept(Accepted(measurement=simulated_measurement().hex(), configuration="0" * 64, simulated=True))

    class No(Quiet):
        def confirm(self, conversation):
            return False

    with open_office(home) as office, pytest.raises(TrustError) as caught:
        submit(folder, place(home, office.address), No())
    assert caught.value.check == "refused"
    assert not (home / "state" / "jobs").exists() or not list((home / "state" / "jobs").iterdir())


def test_a_man_in_the_middle_is_refused(home):
    """He ends the client's TLS, relays everything, and has the enclave's own evidence: for its own certificate."""
    with open_office(home) as office:
        inner = JobChannel(office.address)

        class Relay:
            def answer(self, method, message):
                return inner.ask(method, message)

            def stream(self, method, message, gone):
                return inner.listen(method, message)

            def take(self, message, chunks):
                return inner.send(message, chunks)

        mallory = JobServer(
            listen="127.0.0.1:0", identity=Identity.create(ENCLAVE), methods=(ATTEST,), answering=Relay()
        )
        try:
            with pytest.raises(TrustError) as caught:
                talk(home, mallory.start())
        finally:
            mallory.stop(0)
        assert caught.value.check == "report_data"
        talk(home, office.address)


@pytest.mark.parametrize(
    ("pretence", "words"),
    [
        (Pretence(debug=True), "debug mode"),
        (Pretence(days=-1), "xpired"),
        (Pretence(measurement=b"\x11" * 32), "measurement is not one of the policy's"),
        (Pretence(status="OutOfDate"), "OutOfDate"),
        (Pretence(status="Revoked"), "Revoked"),
    ],
    ids=["debug enclave", "expired collateral", "unknown measurement", "outdated platform", "revoked platform"],
)
def test_evidence_that_does_not_hold_is_refused(home, pretence, words):
    with open_office(home, pretence=pretence) as office, pytest.raises(TrustError, match=words):
        talk(home, office.address)


def test_a_simulated_root_is_refused_without_the_insecure_flag(home):
    strict = Policy(measurements=frozenset([simulated_measurement()]))
    with open_office(home) as office, pytest.raises(TrustError):
        Conversation(office.address, ClientKey(fresh_nonce()), strict)


def test_the_root_of_another_software_platform_is_refused(home, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    furnish(other)
    with open_office(other) as office, pytest.raises(TrustError):
        talk(home, office.address)


def test_keys_are_never_released_without_a_measurement(home):
    lax = Policy(insecure_simulated_root=read_policy(home / "policy.toml").insecure_simulated_root)
    with open_office(home) as office, pytest.raises(UsageError, match="no measurement"):
        Conversation(office.address, ClientKey(fresh_nonce()), lax)


# --- clients ---------------------------------------------------------------------------------------------------------
def test_nobody_impersonates_a_client(home):
    """Another key, with the right name of the job, in a conversation of its own: as if there were no such job."""
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        conversation.release(folder.text, folder.keys, None)
        with talk(home, office.address) as mallory:
            for method in (STATUS, CANCEL):
                with pytest.raises(ServiceError, match="no such job") as caught:
                    mallory.ask(method, job=folder.text.name)
                assert caught.value.check == "job"
            with pytest.raises(ServiceError, match="no such job"):
                mallory.release(folder.text, folder.keys, None)
            for method in (WATCH, FETCH):
                with pytest.raises(ServiceError, match="no such job"):
                    list(mallory.listen(method, job=folder.text.name))
            with pytest.raises(ServiceError, match="another client"):
                mallory.ask(SUBMIT, job=folder.text.encode().decode())
        assert conversation.ask(STATUS, job=folder.text.name)["state"] == READY


@pytest.mark.parametrize("part", ["nonce", "sequence", "client", "body", "signature"])
def test_a_request_that_was_altered_on_its_way_is_refused(home, part):
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        words = load(conversation._signed(CANCEL, {"job": folder.text.name}))
        if part == "body":
            words["body"] = words["body"].replace("{", "{ ")
        elif part == "sequence":
            words["sequence"] += 1
        else:
            words[part] = ("00" if words[part][:2] != "00" else "11") + words[part][2:]
        with conversation, pytest.raises(ServiceError) as caught:
            conversation._channel.ask(CANCEL, dump(words))
        assert caught.value.check in ("signature", "nonce")
        assert office.queue.of(folder.text.name, folder.client.public).state == WAITING


def test_a_request_for_one_method_is_none_for_another(home):
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        message = conversation._signed(STATUS, {"job": folder.text.name})
        with conversation, pytest.raises(ServiceError) as caught:
            conversation._channel.ask(CANCEL, message)
        assert caught.value.check == "signature"


def test_a_job_whose_text_was_changed_on_the_disk_is_not_there_any_more(home):
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        conversation.__exit__(None, None, None)
    (path,) = (home / "state" / "jobs").iterdir()
    text = (path / "job.json").read_bytes()
    (path / "job.json").write_bytes(text.replace(b'"epochs":2', b'"epochs":1'))
    with (
        open_office(home) as office,
        talk(home, office.address, folder.client) as conversation,
        pytest.raises(ServiceError, match="no such job"),
    ):
        conversation.release(folder.text, folder.keys, None)


def test_a_wrong_data_key_is_told_at_once(home):
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        wrong = JobKeys(data=fresh_nonce(), job=fresh_nonce())
        with conversation, pytest.raises(ServiceError) as caught:
            conversation.release(folder.text, wrong, None)
        assert caught.value.check == "head"


def test_a_training_on_data_without_labels_is_refused_before_it_is_queued(home, monkeypatch):
    """By the enclave itself, where the client did not look."""
    seal(home, write_data(home, "bare", labelled=False), "sealed-bare")
    monkeypatch.setattr("darknight.client.job_folder._check_labels", lambda *anything: None)
    with open_office(home) as office:
        folder, conversation = brought(home, office, write_job(home, output="bare", sealed="sealed-bare"))
        with conversation:
            with pytest.raises(ServiceError, match=r'no label.*Seal the data with labels.*kind = "infer"'):
                conversation.release(folder.text, folder.keys, None)
            assert conversation.ask(STATUS, job=folder.text.name)["state"] == WAITING
        assert office.queue.next(timeout=0) is None


# --- sealed records --------------------------------------------------------------------------------------------------
def records_of(home):
    path = home / "sealed" / RECORDS
    return path, bytearray(path.read_bytes())


def read_all(home):
    folder = opened(write_job(home))
    data = open_dataset(home / "sealed", folder.keys.data, manifest=bytes.fromhex(folder.text.data))
    return data.train_x, data.test_x


def tampered(home):
    path, content = records_of(home)
    content[100] ^= 1
    path.write_bytes(content)


def reordered(home):
    path, content = records_of(home)
    size = len(content) // 44
    content[:size], content[size : 2 * size] = content[size : 2 * size], content[:size]
    path.write_bytes(content)


def truncated(home):
    path, content = records_of(home)
    path.write_bytes(content[: -len(content) // 44])


def duplicated(home):
    path, content = records_of(home)
    size = len(content) // 44
    content[size : 2 * size] = content[:size]
    path.write_bytes(content)


def mixed(home):
    """A record of another set, sealed under another key, in the same place."""
    path, content = records_of(home)
    other = seal(home, write_data(home, "other", seed=1), "other-sealed")
    size = len(content) // 44
    content[:size] = (other / RECORDS).read_bytes()[:size]
    path.write_bytes(content)


@pytest.mark.parametrize("attack", [tampered, reordered, truncated, duplicated, mixed])
def test_records_that_are_not_the_sealed_ones_are_refused(home, attack):
    read_all(home)
    attack(home)
    with pytest.raises(TrustError):
        read_all(home)


def test_a_wrong_manifest_is_refused_by_the_enclave_and_by_the_client(home):
    seal(home, write_data(home, "other", seed=1), "other-sealed")
    folder = opened(write_job(home))
    shutil.copy(home / "other-sealed" / MANIFEST, home / "sealed" / MANIFEST)
    with pytest.raises(TrustError, match="key of other data"):
        opened(home / "result.toml")
    with open_office(home) as office, talk(home, office.address, folder.client) as conversation:
        conversation.ask(SUBMIT, job=folder.text.encode().decode())
        with pytest.raises(ServiceError) as caught:
            conversation.upload(home / "sealed" / MANIFEST, job=folder.text.name, offset=0, more=lambda number: None)
        assert caught.value.check == "manifest"


def test_keys_before_the_data_are_refused(home):
    with open_office(home) as office:
        folder = opened(write_job(home))
        with talk(home, office.address, folder.client) as conversation:
            conversation.ask(SUBMIT, job=folder.text.encode().decode())
            conversation.upload(home / "sealed" / HEAD, job=folder.text.name, offset=0, more=lambda number: None)
            with pytest.raises(ServiceError, match=f"{RECORDS}, {MANIFEST} must be sent"):
                conversation.release(folder.text, folder.keys, None)


# --- checkpoints -----------------------------------------------------------------------------------------------------
def checkpoints(folder, keys, tmp_path, *, count=3):
    """Sealed ones of a small training, as the enclave writes them. Returns the receipts."""
    receipts = []
    store = SealedStore(folder, keys.derived("checkpoint"), job=folder.name[-32:], receipt=receipts.append)
    train(tmp_path, network(), every=0.0)
    with Store(tmp_path) as plain:
        latest = plain.latest()
    for _ in range(count):
        store.save(latest)
    return receipts


def test_an_older_checkpoint_is_refused_by_the_clients_receipts(home, tmp_path_factory):
    """A host that rolls its disk back, or loses it."""
    with open_office(home) as office:
        folder, conversation = brought(home, office)
        entry = office.queue.of(folder.text.name, folder.client.public)
        receipts = checkpoints(entry.folder, folder.keys, tmp_path_factory.mktemp("plain"))
        for receipt in receipts:
            folder.keep(receipt)
        found = [path for path in entry.folder.glob("checkpoint-*") if newest(entry.folder)]
        assert folder.checked_resume(newest(entry.folder)) == receipts[-1]
        newest_file = max(found)
        newest_file.unlink()
        with conversation:
            status = conversation.ask(STATUS, job=folder.text.name)
        assert status["checkpoint"]["number"] == receipts[-2].number
        with pytest.raises(TrustError, match="rolled back") as caught:
            submit(folder, place(home, office.address), Quiet())
        assert caught.value.check == "rollback"
        for path in entry.folder.glob("checkpoint-*"):
            path.unlink()
        with pytest.raises(TrustError, match="rolled back"):
            submit(folder, place(home, office.address), Quiet())
        assert office.queue.next(timeout=0) is None


def test_an_older_checkpoint_under_the_newest_name_is_refused(home, tmp_path_factory):
    with open_office(home) as office:
        folder, _ = brought(home, office)
        entry = office.queue.of(folder.text.name, folder.client.public)
        receipts = checkpoints(entry.folder, folder.keys, tmp_path_factory.mktemp("plain"))
        folder.keep(receipts[-1])
        old, new = sorted(entry.folder.glob("checkpoint-*"))
        old.replace(new)
        with pytest.raises(TrustError, match="not the one of this client's receipt"):
            submit(folder, place(home, office.address), Quiet())
        # A client that knows no receipt would release the key; the enclave does not open it under that number.
        store = SealedStore(
            entry.folder, folder.keys.derived("checkpoint"), job=folder.text.name, receipt=lambda receipt: None
        )
        with pytest.raises(TrustError):
            store.open(newest(entry.folder))


def test_a_checkpoint_of_another_job_does_not_open(home, tmp_path_factory):
    """Even of the same client, under the same key: the label has the job's name."""
    with Queue(home / "state", workers=len(OPERATORS)) as queue:
        folder = opened(write_job(home))
        one, two = home / ("1" * 32), home / ("2" * 32)
        one.mkdir()
        two.mkdir()
        receipts = checkpoints(one, folder.keys, tmp_path_factory.mktemp("plain"), count=1)
        for path in one.glob("checkpoint-*"):
            shutil.copy(path, two)
        key = folder.keys.derived("checkpoint")
        assert SealedStore(one, key, job=one.name, receipt=receipts.append).open(receipts[0]).card == card()
        with pytest.raises(TrustError):
            SealedStore(two, key, job=two.name, receipt=receipts.append).open(receipts[0])
        with pytest.raises(TrustError):
            SealedStore(one, DataKey.fresh(), job=one.name, receipt=receipts.append).open(receipts[0])
        assert queue.next(timeout=0) is None


def test_the_attested_configuration_is_what_the_client_sees(home):
    with open_office(home) as office, talk(home, office.address) as conversation:
        assert conversation.offer.configuration == CONFIGURATION.encode()
        assert [worker["operator"] for worker in conversation.configuration["workers"]] == list(OPERATORS)


# --- strangers --------------------------------------------------------------------------------------------------------
def knock(channel, method, message):
    if method == UPLOAD:
        channel.send(message, iter([message]))
    elif method in (WATCH, FETCH):
        list(channel.listen(method, message))
    else:
        channel.ask(method, message)


def test_a_door_that_anybody_may_knock_at_survives_it(home, full):
    """Whatever is sent to whatever method, the next client is served."""
    generator = random.Random(3)
    texts = [b"", b"{}", b"[]", b"\xff" * 9, b'{"nonce": "00"}', b'{"nonce": 5}', dump({"nonce": "00" * 32}) * 2]
    with open_office(home) as office:
        channel = JobChannel(office.address)
        for _ in range(300 if full else 40):
            message = generator.choice([*texts, generator.randbytes(generator.randrange(300))])
            method = generator.choice(METHODS)
            with pytest.raises(ServiceError) as caught:
                knock(channel, method, message)
            assert caught.value.check != "unreachable"
        with pytest.raises(ServiceError) as caught:
            channel.ask("Unknown", b"{}")
        assert caught.value.check == "unreachable"
        talk(home, office.address)
