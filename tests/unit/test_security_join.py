"""Joining: the string, the messages and both state machines, with the clock in our hands."""

from __future__ import annotations

import base64
import json
import logging
import random
import traceback
from datetime import datetime, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from torchslicer.cluster.security import (
    Authority,
    Identity,
    JoinClient,
    JoinServer,
    JoinString,
    SecretBytes,
    certificates,
    read_join_file,
    write_join_file,
)
from torchslicer.cluster.security.messages import MAX_MESSAGE, decode, encode
from torchslicer.errors import SecurityError

NOW = 1_900_000_000.0
RUN = "run-1"
CANARY = b"canary-secret-of-32-bytes-000000"


class Run:
    """A coordinator that nodes can join, at a time of the test's choice."""

    def __init__(self, *, run_id: str = RUN, slots: int = 4, secret: bytes = CANARY) -> None:
        self.now = NOW
        begin = datetime.fromtimestamp(NOW, timezone.utc)
        self.authority = Authority.create(run_id, now=begin)
        self.leaf = self.authority.issue(Identity(run_id, "coordinator"), now=begin).certificate
        fingerprint = self.authority.fingerprint
        self.joining = JoinString(run_id, fingerprint, b"token-id", SecretBytes(secret), int(NOW) + 3600)
        self.server = JoinServer(self.authority, self.joining, leaf=self.leaf, slots=slots, clock=lambda: self.now)

    def client(self, node: str = "worker-0", **changes) -> JoinClient:
        arguments = {"joining": self.joining, "leaf": self.leaf, "clock": lambda: self.now, **changes}
        return JoinClient(arguments.pop("joining"), node, **arguments)

    def join(self, node: str = "worker-0", source: str = "10.0.0.7", **changes):
        client, session = self.client(node, **changes), self.server.session(source)
        return client.finish(session.handle(client.request(session.handle(client.hello()).message)).message)


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_node_joins_and_gets_a_certificate_for_its_own_key(run):
    material = run.join("worker-0", role="peer")
    certificates.check_node(
        material.certificate,
        Identity(RUN, "worker-0"),
        authority=run.authority.certificate,
        now=certificates.expires_at(material.certificate),
    )
    key = serialization.load_pem_private_key(material.key.reveal(), None)
    assert certificates.holds_key(material.certificate, key)
    assert material.authority == run.authority.certificate
    assert certificates.expires_at(material.certificate) == certificates.expires_at(run.authority.certificate)
    assert run.server.joined == {"worker-0"}


def test_what_is_sent_holds_no_secret_and_the_hello_nothing_of_the_string(run):
    client, session = run.client(), run.server.session("10.0.0.7")
    hello = client.hello()
    challenge = session.handle(hello).message
    request = client.request(challenge)
    grant = session.handle(request).message
    for message in (hello, challenge, request, grant):
        for form in (CANARY, CANARY.hex().encode(), base64.b64encode(CANARY)[:-2]):
            assert form not in message
        assert b"PRIVATE" not in message
    for fact in (RUN.encode(), b"token-id".hex().encode()):
        assert fact not in hello
        assert fact in request


def test_names_are_given_once_and_slots_are_counted():
    run = Run(slots=2)
    run.join("a")
    with pytest.raises(SecurityError, match="of this name has joined"):
        run.join("a")
    with pytest.raises(SecurityError, match="of this name has joined"):
        run.join("coordinator")
    run.join("b")
    with pytest.raises(SecurityError, match="as many nodes"):
        run.join("c")
    run.server.release("a")
    run.join("c")
    assert run.server.joined == {"b", "c"}


def test_a_recorded_request_is_of_no_use_again(run):
    client, session = run.client(), run.server.session("10.0.0.7")
    hello = client.hello()
    request = client.request(session.handle(hello).message)
    assert session.handle(request).granted == "worker-0"
    assert session.handle(request).refused == "malformed"  # the same connection
    run.server.release("worker-0")
    other = run.server.session("10.0.0.8")  # another connection, another nonce
    other.handle(hello)
    assert other.handle(request).refused == "token"
    assert run.server.joined == set()


def test_a_proof_is_bound_to_the_leaf_that_the_worker_saw(run):
    another = run.authority.issue(Identity(RUN, "coordinator"), now=datetime.fromtimestamp(NOW, timezone.utc))
    with pytest.raises(SecurityError, match="token"):
        run.join(leaf=another.certificate)


def test_the_wrong_token_is_refused(run):
    wrong = JoinString(RUN, run.joining.fingerprint, b"token-id", SecretBytes(bytes(32)), run.joining.expires_at)
    other = JoinString(RUN, run.joining.fingerprint, b"token-xx", run.joining.secret, run.joining.expires_at)
    for joining in (wrong, other):
        with pytest.raises(SecurityError, match="not this run's"):
            run.join(joining=joining)


def test_another_run_is_refused_by_both_sides(run):
    foreign = JoinString("run-2", run.joining.fingerprint, b"token-id", run.joining.secret, run.joining.expires_at)
    with pytest.raises(SecurityError, match="expected that of torchslicer:run-2/coordinator"):
        run.join(joining=foreign)
    session = run.server.session("10.0.0.7")
    session.handle(encode("hello", protocol="1", nonce="00" * 32))
    names = {"token": "00" * 8, "role": "worker", "node": "a", "csr": "x", "proof": "00" * 32}
    assert session.handle(encode("request", run="run-2", **names)).refused == "run"


def test_after_its_time_the_token_is_refused(run):
    run.now = run.joining.expires_at - 1
    run.join("a")
    run.now += 1
    with pytest.raises(SecurityError, match="time of the join string is over"):
        run.join("b")


def test_the_worker_refuses_a_coordinator_that_is_not_the_one_in_the_string(run):
    impostor = Run()
    with pytest.raises(SecurityError, match="fingerprint is not the one"):
        run.join(joining=impostor.joining)
    # the right authority, shown beside a leaf that it did not sign
    with pytest.raises(SecurityError, match="not signed by whom"):
        run.join(leaf=impostor.leaf)
    # the right authority, but a worker's leaf
    begin = datetime.fromtimestamp(NOW, timezone.utc)
    worker = run.authority.issue(Identity(RUN, "worker-9"), now=begin).certificate
    with pytest.raises(SecurityError, match="expected that of"):
        run.join(leaf=worker)
    # the authority itself as leaf
    with pytest.raises(SecurityError, match="certificate"):
        run.join(leaf=run.authority.certificate)


def test_the_worker_refuses_certificates_out_of_date(run):
    for shift in (-3600, 8 * 86_400):
        with pytest.raises(SecurityError, match="set the clocks"):
            run.join(clock=lambda shift=shift: NOW + shift)


def test_the_worker_refuses_a_grant_that_does_not_prove_the_token(run):
    client, session = run.client(), run.server.session("10.0.0.7")
    grant = json.loads(session.handle(client.request(session.handle(client.hello()).message)).message)
    forged = {**grant, "proof": "00" * 32}
    with pytest.raises(SecurityError, match="does not know the token"):
        client.finish(json.dumps(forged).encode())
    swapped = {**grant, "certificate": run.leaf.decode()}
    with pytest.raises(SecurityError, match="does not know the token"):
        client.finish(json.dumps(swapped).encode())


def test_answers_out_of_order_are_refused(run):
    client = run.client()
    proof = run.joining.secret.mac(b"").hex()
    with pytest.raises(SecurityError):
        client.finish(encode("grant", certificate="x", proof=proof))
    with pytest.raises(SecurityError, match="reason that this version does not know"):
        client.request(encode("refused", code="<b>anything</b>"))


def test_after_failures_a_source_must_wait_and_others_need_not(run):
    for _ in range(5):
        assert run.server.session("10.0.0.7").handle(b"garbage").refused == "malformed"
    with pytest.raises(SecurityError, match="wait a minute"):
        run.join("a", source="10.0.0.7")
    run.join("b", source="10.0.0.8")
    run.now += 60
    run.join("a", source="10.0.0.7")


def test_the_memory_for_failures_is_bounded(run):
    for number in range(3000):
        run.server.count_failure(str(number))
    assert len(run.server._failures) == 1024


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"[" * 10_000,
        b"9" * 10_000,
        b'{"type": "hello"}',
        b'{"type": ["hello"]}',
        b'{"type": "hello", "protocol": "1", "nonce": 5}',
        encode("hello", protocol="1", nonce="00" * 31),
        encode("hello", protocol="1", nonce="0G" * 32),
        encode("hello", protocol="1", nonce=" 0" * 32),
        encode("hello", protocol="1", nonce="\ud800" * 64),
        encode("grant", certificate="", proof=""),
        b" " * (MAX_MESSAGE + 1),
    ],
)
def test_malformed_messages_are_refused(run, message):
    reply = run.server.session("10.0.0.7").handle(message)
    assert (reply.refused, reply.final) == ("malformed", True)
    with pytest.raises(SecurityError):
        run.client().request(message)


def test_another_version_is_named(run):
    assert run.server.session("x").handle(encode("hello", protocol="2", nonce="00" * 32)).refused == "protocol"


@pytest.mark.parametrize("node", ["", "A", "../x", "a b", "x" * 64, "coordinator\n"])
def test_a_malformed_name_is_refused_before_anything_is_sent(run, node):
    with pytest.raises(SecurityError, match="node name"):
        run.client(node)


def test_a_key_of_another_kind_is_not_signed():
    keys = [(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()), (ed25519.Ed25519PrivateKey.generate(), None)]
    for key, digest in keys:
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        csr = builder.sign(key, digest).public_bytes(serialization.Encoding.PEM)
        with pytest.raises(SecurityError, match="P-256"):
            certificates.requested_key(csr)


def test_the_string_round_trips_and_shows_nothing(run):
    line = run.joining.reveal()
    assert JoinString.parse(f"  {line}\n", now=NOW) == run.joining
    for text in (str(run.joining), repr(run.joining), f"{run.joining}"):
        assert "***" in text
        assert "canary" not in text
        assert line[60:] not in text


def test_an_expired_string_is_refused_by_the_worker(run):
    with pytest.raises(SecurityError, match="was over 100 s ago"):
        JoinString.parse(run.joining.reveal(), now=NOW + 3700)


@pytest.mark.parametrize("end", [0, -1, 253_402_300_800])
def test_a_string_without_a_sensible_end_is_not_made(end):
    with pytest.raises(SecurityError, match="an end before"):
        JoinString.create(RUN, bytes(32), expires_at=end)


def test_a_join_file_is_for_its_owner(run, tmp_path):
    path = write_join_file(tmp_path / "join", run.joining)
    assert read_join_file(path, now=NOW) == run.joining
    (tmp_path / "join" / "join").chmod(0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        read_join_file(path, now=NOW)


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(4):
            case 0 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if changed:
                del changed[at : at + rng.randint(1, 30)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 30))
            case _:
                changed[at : at + 1] = b'"{}[]\\u-.= \0'[rng.randrange(13) :][:1]
    return bytes(changed)


def test_a_thousand_damaged_strings_give_only_the_typed_error(run):
    rng, line = random.Random(3), run.joining.reveal()
    for _ in range(1000):
        text = mutated(line.encode(), rng).decode("latin-1")
        if text.strip() == line:
            continue
        with pytest.raises(SecurityError) as caught:
            JoinString.parse(text, now=NOW)
        assert line[40:90] not in str(caught.value)


def test_a_thousand_damaged_messages_get_nobody_in_and_raise_only_the_typed_error(run):
    rng = random.Random(4)
    client, session = run.client(), run.server.session("10.0.0.7")
    hello = client.hello()
    challenge = session.handle(hello).message
    request = client.request(challenge)
    state, asked = dict(vars(session)), dict(vars(client))
    grant = session.handle(request).message
    run.server.release("worker-0")
    for round_number in range(1000):
        source = str(round_number)
        fresh = run.server.session(source)
        fresh.handle(mutated(hello, rng))
        waiting = run.server.session(source)
        vars(waiting).update(state, _source=source)
        changed = mutated(request, rng)
        reply = waiting.handle(changed)
        # white space between the fields is not part of what is said
        assert reply.granted is None or decode(changed, "request") == decode(request, "request")
        run.server.release("worker-0")
        for handle, message in ((client.request, challenge), (client.finish, grant)):
            changed = mutated(message, rng)
            try:
                handle(changed)
            except SecurityError:
                continue
            finally:
                vars(client).update(asked)
    assert run.server.joined == set()


def test_no_error_log_or_traceback_shows_the_secret(run, caplog):
    caplog.set_level(logging.DEBUG)
    secret_forms = ("canary", CANARY.hex(), base64.b64encode(CANARY)[:-2].decode(), run.joining.reveal()[40:])
    wrong = JoinString(RUN, run.joining.fingerprint, b"token-xx", SecretBytes(CANARY), run.joining.expires_at)
    text = []
    for attempt in (
        lambda: run.join(joining=wrong),
        lambda: run.join(joining=Run().joining),
        lambda: run.join("coordinator"),
        lambda: JoinString.parse(run.joining.reveal()[:-1], now=NOW),
        lambda: JoinString.parse(run.joining.reveal() + "=", now=NOW),
        lambda: JoinString.parse(run.joining.reveal(), now=NOW + 10**6),
    ):
        with pytest.raises(SecurityError) as caught:
            attempt()
        text += [*traceback.format_exception(caught.value), repr(caught.value), str(vars(caught.value))]
    text += [caplog.text, repr(run.server), repr(vars(run.server)), repr(run.client()), repr(vars(run.client()))]
    text.append(repr(run.join("worker-7")))
    for form in secret_forms:
        assert all(form not in part for part in text)
    assert all("PRIVATE" not in part for part in text)
