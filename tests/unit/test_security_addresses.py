"""Addresses: how they are written, which are loopback, and which one others can reach."""

from __future__ import annotations

import socket

import pytest

from torchslicer.cluster.security import Address, advertised_address, is_loopback, parse_address
from torchslicer.errors import ConfigError

NAMES = {"here": ["127.0.0.1", "::1"], "both": ["127.0.0.1", "192.0.2.7"], "there": ["192.0.2.7"]}


def names(host: str) -> list[str]:
    return NAMES.get(host, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-a:50051", Address("worker-a", 50051)),
        ("10.0.0.1:0", Address("10.0.0.1", 0)),
        ("[::1]:50054", Address("::1", 50054)),
        ("[fe80::1%eth0]:1", Address("fe80::1%eth0", 1)),
        ("[::ffff:127.0.0.1]:1", Address("::ffff:127.0.0.1", 1)),
        (":50054", Address("", 50054)),
        ("unix:/run/ts.sock", Address(path="/run/ts.sock")),
    ],
)
def test_every_form_is_read_and_written_back(text, expected):
    assert parse_address(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host", "the port is missing"),
        ("[::1]", "the port is missing"),
        ("::1:50054", "in brackets"),
        ("http://host:80", "leave out the scheme"),
        ("host:65536", "up to 65535"),
        ("host:-1", "HOST:PORT"),
        ("host:１", "HOST:PORT"),
        ("[1.2.3.4]:5", "IPv6 address between the brackets"),
        ("[:::]:5", "IPv6 address between the brackets"),
        ("a b:1", "HOST:PORT"),
        ("", "HOST:PORT"),
        ("x" * 10_000 + ":1", "HOST:PORT"),
        ("unix:relative", "absolute path"),
        ("unix:/a\0b", "absolute path"),
        ("unix:/" + "x" * 200, "at most 103 bytes"),
    ],
)
def test_other_texts_are_refused_with_the_form(text, says):
    with pytest.raises(ConfigError, match=r"^address: expected") as caught:
        parse_address(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("[::ffff:127.0.0.1]:1", True),
        ("unix:/run/a", True),
        ("here:1", True),
        ("both:1", False),
        ("there:1", False),
        ("nowhere:1", False),
        (":1", False),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("[::ffff:0.0.0.0]:1", False),
        ("10.0.0.1:1", False),
        ("[fe80::1%eth0]:1", False),
    ],
)
def test_loopback_means_every_resolved_address(text, expected):
    assert is_loopback(text, resolve=names) is expected


def test_localhost_is_loopback_and_zero_is_not():
    assert is_loopback("localhost:1")
    assert not is_loopback("0:1")  # what the C library takes for 0.0.0.0


ROUTES = {(socket.AF_INET, "192.0.2.1"): "10.0.0.5", (socket.AF_INET, "192.0.2.7"): "192.0.2.50"}
ROUTES_6 = {(socket.AF_INET6, "2001:db8::1"): "2001:db8::5"}


@pytest.mark.parametrize(
    ("bind", "hint", "toward", "routes", "expected"),
    [
        ("127.0.0.1:5", None, None, ROUTES, "127.0.0.1:5"),
        ("unix:/run/a", None, None, ROUTES, "unix:/run/a"),
        ("worker-a:5", None, None, ROUTES, "worker-a:5"),
        ("0.0.0.0:5", None, None, ROUTES, "10.0.0.5:5"),
        (":5", None, None, ROUTES, "10.0.0.5:5"),
        ("0.0.0.0:5", None, "192.0.2.7:50054", ROUTES, "192.0.2.50:5"),
        ("0.0.0.0:5", None, "there:50054", ROUTES, "192.0.2.50:5"),
        ("0.0.0.0:5", None, "nowhere:50054", ROUTES, "10.0.0.5:5"),
        ("[::]:5", None, None, ROUTES, "10.0.0.5:5"),
        ("[::]:5", None, None, ROUTES_6, "[2001:db8::5]:5"),
        ("0.0.0.0:5", None, None, ROUTES_6, "127.0.0.1:5"),
        ("0.0.0.0:5", None, None, {(socket.AF_INET, "192.0.2.1"): "0.0.0.0"}, "127.0.0.1:5"),
        ("[::]:5", None, None, {}, "[::1]:5"),
        ("0.0.0.0:5", "gpu-1", None, ROUTES, "gpu-1:5"),
        ("0.0.0.0:5", "gpu-1:6", None, ROUTES, "gpu-1:6"),
        ("0.0.0.0:5", "2001:db8::9", None, ROUTES, "[2001:db8::9]:5"),
        ("0.0.0.0:5", "[2001:db8::9]", None, ROUTES, "[2001:db8::9]:5"),
        ("0.0.0.0:5", "[2001:db8::9]:7", None, ROUTES, "[2001:db8::9]:7"),
    ],
)
def test_advertised_address_can_be_connected_to(bind, hint, toward, routes, expected):
    found = advertised_address(
        bind, hint, toward=toward, route=lambda family, host: routes.get((family, host)), resolve=names
    )
    assert str(found) == expected
    assert not found.is_wildcard


@pytest.mark.parametrize("hint", ["0.0.0.0", "[::]", "::", "0.0.0.0:5", ":5"])
def test_a_wildcard_is_no_hint(hint):
    with pytest.raises(ConfigError, match="nobody can connect to it"):
        advertised_address("0.0.0.0:5", hint)


def test_the_real_routing_table_gives_an_address_of_this_machine():
    assert not advertised_address("0.0.0.0:5").is_wildcard
