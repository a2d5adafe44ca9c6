"""The start-up rule of SECURITY section 5, cell by cell."""

from __future__ import annotations

import itertools

import pytest

from torchslicer.cluster.security import Action, decide, decide_connect
from torchslicer.errors import SecurityError

LOOPBACK = ["127.0.0.1:0", "[::1]:5", "unix:/run/ts.sock", "here:5"]
BEYOND = ["0.0.0.0:50054", ":50054", "[::]:50054", "10.0.0.1:5", "there:5", "both:5", "nowhere:5"]
ROLES = ["coordinator", "worker", "peer"]
TRANSPORTS = ["grpc", "tcp"]
FLAGS = list(itertools.product([False, True], repeat=2))

START, OWN, REFUSE = Action.START, Action.MAKE_OWN_CA, Action.REFUSE

# tls, token, pinned names -> (coordinator, worker and peer) and whether the double opt-in still warns
BEYOND_TABLE = [
    (True, True, True, START, START, False),
    (True, True, False, START, START, False),
    (True, False, True, START, START, False),
    (True, False, False, REFUSE, REFUSE, True),
    (False, True, False, REFUSE, REFUSE, True),
    (False, True, True, REFUSE, REFUSE, True),
    (False, False, False, OWN, REFUSE, True),
    (False, False, True, OWN, REFUSE, True),
]


def names(host: str) -> list[str]:
    return {"here": ["127.0.0.1", "::1"], "both": ["127.0.0.1", "192.0.2.7"], "there": ["192.0.2.7"]}.get(host, [])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("bind", LOOPBACK)
def test_loopback_always_starts(role, transport, bind):
    for tls, token, pinned, argument, environment in itertools.product([False, True], repeat=5):
        decision = decide(
            bind,
            tls=tls,
            token=token,
            pinned_names=pinned,
            insecure_argument=argument,
            insecure_environment=environment,
            role=role,
            transport=transport,
            resolve=names,
        ).check()
        assert (decision.action, decision.warnings, decision.insecure) == (START, (), False)
        assert decision.make_token is (not tls and not token)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("cell", BEYOND_TABLE, ids=lambda cell: "-".join(map(str, cell[:3])))
def test_beyond_loopback(role, cell):
    tls, token, pinned, coordinator, others, unsafe = cell
    expected = coordinator if role == "coordinator" else others
    for transport, bind, (argument, environment) in itertools.product(TRANSPORTS, BEYOND, FLAGS):
        decision = decide(
            bind,
            tls=tls,
            token=token,
            pinned_names=pinned,
            insecure_argument=argument,
            insecure_environment=environment,
            role=role,
            transport=transport,
            resolve=names,
        )
        twice = argument and environment
        assert decision.action is (START if twice else expected)
        assert decision.insecure is (twice and unsafe)
        assert not decision.make_token
        if twice:
            assert len(decision.warnings) == int(unsafe)
            assert all(text.startswith("INSECURE") and transport in text for text in decision.warnings)
        elif expected is not START and argument != environment:
            assert "alone has no effect" in decision.warnings[0]
        else:
            assert decision.warnings == ()


@pytest.mark.parametrize("role", ROLES)
def test_a_refusal_names_the_three_ways_out(role):
    decision = decide(
        "0.0.0.0:5",
        tls=False,
        token=True,
        pinned_names=False,
        insecure_argument=False,
        insecure_environment=False,
        role=role,
    )
    with pytest.raises(SecurityError) as caught:
        decision.check()
    text = str(caught.value)
    assert role in text
    assert "0.0.0.0:5" in text
    for way in ("torchslicer certs init", "ssh -L", "WireGuard", "insecure=True", "TS_INSECURE=1"):
        assert way in text
    assert ("--join" in text) is (role == "worker")


@pytest.mark.parametrize("address", LOOPBACK)
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(("argument", "environment"), FLAGS)
def test_connecting_on_this_machine_is_free(address, tls, argument, environment):
    decision = decide_connect(
        address, tls=tls, insecure_argument=argument, insecure_environment=environment, resolve=names
    )
    assert (decision.action, decision.warnings, decision.insecure) == (START, (), False)


@pytest.mark.parametrize("address", ["10.0.0.1:5", "there:5", "both:5", "nowhere:5"])
@pytest.mark.parametrize(("argument", "environment"), FLAGS)
def test_connecting_elsewhere_needs_tls(address, argument, environment):
    flags = {"insecure_argument": argument, "insecure_environment": environment, "resolve": names}
    assert decide_connect(address, tls=True, **flags) == decide_connect("here:5", tls=True, **flags)
    plain = decide_connect(address, tls=False, **flags)
    assert plain.action is (START if argument and environment else REFUSE)
    assert plain.insecure is (argument and environment)
    assert bool(plain.warnings) is (argument or environment)
    if plain.action is REFUSE:
        with pytest.raises(SecurityError, match=r"--join.*certs init.*ssh -L.*TS_INSECURE"):
            plain.check()
