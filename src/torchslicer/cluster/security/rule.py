"""The start-up rule: who may listen or connect where, with which protection. A pure function of what was asked.

======================  ===========  =======================  ==============  ===========================
bind                    TLS + token  TLS only                 token only      nothing
======================  ===========  =======================  ==============  ===========================
UNIX socket, loopback   start        start                    start           start
anything else           start        start if names are       refuse          coordinator: make an own CA;
                                     pinned, else refuse                      worker, peer: refuse
... and insecure twice  start        start, warn              start, warn     start, warn
======================  ===========  =======================  ==============  ===========================

"Insecure twice" is the argument ``insecure=True`` *and* ``TS_INSECURE=1`` in the environment, which the configuration
reads. One of the two alone changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torchslicer.cluster.security.addresses import Address, Resolve, is_loopback, parse_address, resolve
from torchslicer.errors import SecurityError

Role = Literal["coordinator", "worker", "peer"]
Transport = Literal["grpc", "tcp"]

WAYS_OUT = (
    "use certificates (`torchslicer certs init --out certs --workers a,b`, then the network.tls settings), "
    "or stay on loopback and cross machines by `ssh -L` or WireGuard, "
    "or accept plain text by insecure=True together with TS_INSECURE=1 in the environment"
)


class Action(Enum):
    """What the start-up rule says."""

    START = "start"
    MAKE_OWN_CA = "make_own_ca"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Decision:
    """The verdict, what to warn of, and why it is a refusal.

    ``insecure`` says that the user's double opt-in was needed: it belongs in the run's manifest.
    ``make_token`` says that processes we start ourselves are to be given a token of ours, in a 0600 file.
    """

    action: Action
    warnings: tuple[str, ...] = ()
    refusal: str = ""
    insecure: bool = False
    make_token: bool = False

    def check(self) -> Decision:
        """Return the decision itself unless it is a refusal.

        Raises:
            SecurityError: The rule refuses; the message names the three ways out.
        """
        if self.action is Action.REFUSE:
            raise SecurityError("; ".join((self.refusal, *self.warnings)))
        return self


def decide(
    bind: Address | str,
    *,
    tls: bool,
    token: bool,
    pinned_names: bool,
    insecure_argument: bool,
    insecure_environment: bool,
    role: Role = "coordinator",
    transport: Transport = "grpc",
    resolve: Resolve = resolve,
) -> Decision:
    """Decide whether *role* may listen at *bind*. A worker that has joined has TLS and pinned names.

    Args:
        bind: Where it would listen.
        tls: Certificates were given, or got by joining; both sides show one.
        token: A token was given.
        pinned_names: The names that the other side's certificate may have are fixed.
        insecure_argument: The caller passed ``insecure=True``.
        insecure_environment: ``TS_INSECURE`` is 1.
        role: Who listens.
        transport: What it would speak; the rule is the same for both.
        resolve: Asks the name service; replaced in tests.

    Raises:
        ConfigError: *bind* is a text in none of the known forms.

    >>> kinds = {"tls": False, "token": False, "pinned_names": False}
    >>> decide("127.0.0.1:0", **kinds, insecure_argument=False, insecure_environment=False).action.value
    'start'
    >>> decide("0.0.0.0:0", **kinds, insecure_argument=False, insecure_environment=False).action.value
    'make_own_ca'
    """
    where = parse_address(bind) if isinstance(bind, str) else bind
    if is_loopback(where, resolve=resolve):
        return Decision(Action.START, make_token=not tls and not token)
    if tls and (token or pinned_names):
        return Decision(Action.START)
    what = f"{role}: the {transport} port {where} can be reached from other machines"
    lack = "its certificates pin no names and there is no token" if tls else "there are no certificates"
    if insecure_argument and insecure_environment:
        return Decision(Action.START, (f"INSECURE: {what} and {lack}: {_exposure(tls)}",), insecure=True)
    warnings = _half_opt_in(insecure_argument, insecure_environment)
    if role == "coordinator" and not tls and not token:
        return Decision(Action.MAKE_OWN_CA, warnings)
    return Decision(Action.REFUSE, warnings, refusal=f"{what}, but {lack}; {_ways_out(role, tls, token)}")


def decide_connect(
    address: Address | str,
    *,
    tls: bool,
    insecure_argument: bool,
    insecure_environment: bool,
    resolve: Resolve = resolve,
) -> Decision:
    """Decide whether one may connect to *address*: plain text is for loopback only.

    Joining counts as TLS: the fingerprint in the join string says whom to trust.

    Raises:
        ConfigError: *address* is a text in none of the known forms.

    >>> decide_connect("10.0.0.1:50054", tls=True, insecure_argument=False, insecure_environment=False).action.value
    'start'
    """
    where = parse_address(address) if isinstance(address, str) else address
    if tls or is_loopback(where, resolve=resolve):
        return Decision(Action.START)
    what = f"connecting to {where}, which is not on this machine, without TLS"
    if insecure_argument and insecure_environment:
        return Decision(Action.START, (f"INSECURE: {what}: {_exposure(tls)}",), insecure=True)
    warnings = _half_opt_in(insecure_argument, insecure_environment)
    advice = "give the coordinator's join string (--join, TORCHSLICER_JOIN), or " + WAYS_OUT
    return Decision(Action.REFUSE, warnings, refusal=f"{what} is refused; {advice}")


def _exposure(tls: bool) -> str:
    if tls:
        return "whoever holds any certificate of this authority can take any part in the run"
    return "anybody on the network can read and change the training, and take part in it"


def _half_opt_in(argument: bool, environment: bool) -> tuple[str, ...]:
    if argument == environment:
        return ()
    given, missing = ("insecure=True", "TS_INSECURE=1") if argument else ("TS_INSECURE=1", "insecure=True")
    return (f"{given} alone has no effect: plain text off loopback needs {missing} as well",)


def _ways_out(role: Role, tls: bool, token: bool) -> str:
    if role == "peer":
        return WAYS_OUT  # there is no coordinator to join
    if role != "coordinator":
        return "join a coordinator (--join, TORCHSLICER_JOIN), or " + WAYS_OUT
    own = "leave the token out too, and the coordinator makes certificates of its own, or " if token and not tls else ""
    return own + WAYS_OUT
