"""Secrets: never shown, and in files for their owner only; and the certificates that `certs init` writes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import sys
from datetime import datetime, timedelta, timezone

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from torchslicer.cli.certs import certs
from torchslicer.cluster import security
from torchslicer.cluster.security import Authority, Identity, Material, SecretBytes, write_deployment
from torchslicer.cluster.security.files import read_private, read_public, write_private
from torchslicer.errors import ConfigError, SecurityError

CANARY = b"canary-9f31c7"


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_never_shown():
    secret = SecretBytes(CANARY)
    shown = [repr(secret), str(secret), f"{secret:}", repr([secret]), str({"key": secret}), repr(copy.deepcopy(secret))]
    assert all("canary" not in text and "***" in text for text in shown)
    for attempt in (pickle.dumps, json.dumps):
        with pytest.raises(TypeError) as caught:
            attempt(secret)
        assert "canary" not in str(caught.value)
    assert secret == SecretBytes(CANARY)
    assert secret != SecretBytes(b"other")
    assert secret != CANARY
    assert secret.reveal() == CANARY


def test_files_are_for_their_owner_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        (path,) = write_private(tmp_path / "deep" / "new", {"token": CANARY})
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert read_private(path, what="token") == CANARY


def test_nothing_is_overwritten_and_nothing_left_half_done(tmp_path):
    folder = tmp_path / "out"
    write_private(folder, {"b": b"old"})
    with pytest.raises(SecurityError, match="exists already and is never overwritten"):
        write_private(folder, {"a": b"new", "b": b"new"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"b": b"old"}


def test_links_are_not_followed_on_writing(tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(SecurityError, match="folder"):
        write_private(tmp_path / "link", {"a": b""})
    (target / "a").symlink_to(tmp_path / "planted")
    with pytest.raises(SecurityError, match="exists already"):
        write_private(target, {"a": b""})
    assert not (tmp_path / "planted").exists()


def test_an_open_folder_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(SecurityError, match="chmod 700"):
        write_private(tmp_path, {"a": b""})


@pytest.mark.parametrize("bits", [0o644, 0o640, 0o606, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path, bits):
    path = tmp_path / "key"
    path.write_bytes(CANARY)
    path.chmod(bits)
    with pytest.raises(SecurityError, match="chmod 600") as caught:
        read_private(path, what="private key")
    assert "canary" not in str(caught.value)
    assert read_public(path, what="certificate") == CANARY


def test_what_is_no_small_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "large").write_bytes(bytes(70_000))
    (tmp_path / "large").chmod(0o600)
    for name in ("fifo", "large", "missing", ".", "nul\0"):
        with pytest.raises(SecurityError, match="private key"):
            read_private(f"{tmp_path}/{name}", what="private key")


def test_certs_init_writes_what_the_nodes_need(tmp_path):
    out = tmp_path / "certs"
    arguments = ["init", "--out", str(out), "--workers", "gpu-a, gpu-b", "--hosts", "gpu-a=10.0.0.7,gpu-a.lab"]
    result = CliRunner().invoke(certs, [*arguments, "--hosts", "coordinator=::1"])
    assert result.exit_code == 0, result.output
    names = {"ca.pem", "coordinator.pem", "coordinator.key", "gpu-a.pem", "gpu-a.key", "gpu-b.pem", "gpu-b.key"}
    assert {path.name for path in out.iterdir()} == names
    assert {mode(path) for path in out.iterdir()} == {0o600}
    assert mode(out) == 0o700
    assert "PRIVATE" not in result.output

    authority = x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
    leaf = x509.load_pem_x509_certificate((out / "gpu-a.pem").read_bytes())
    leaf.verify_directly_issued_by(authority)
    found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.UniformResourceIdentifier) == ["torchslicer:fixed/gpu-a"]
    assert found.get_values_for_type(x509.DNSName) == [Identity("fixed", "gpu-a").dns_name, "gpu-a", "gpu-a.lab"]
    assert [str(address) for address in found.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    key = load_pem_private_key((out / "gpu-a.key").read_bytes(), None)
    assert key.public_key() == leaf.public_key()
    assert leaf.not_valid_after_utc - datetime.now(timezone.utc) <= timedelta(days=90)
    assert Material.from_files(out / "gpu-a.pem", out / "gpu-a.key", out / "ca.pem").key.reveal().startswith(b"-----")

    before = {path: path.read_bytes() for path in out.iterdir()}
    again = CliRunner().invoke(certs, arguments)
    assert isinstance(again.exception, SecurityError)
    assert "never overwritten" in str(again.exception)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("workers", "hosts", "says"),
    [
        ([], {}, "one or more names"),
        (["a", "a"], {}, "each once"),
        (["coordinator"], {}, "each once"),
        (["ca"], {}, "none of them 'ca'"),
        (["../x"], {}, "node name"),
        (["A"], {}, "node name"),
        (["a" * 64], {}, "node name"),
        (["a"], {"b": ["h"]}, "'b' is no node"),
        (["a"], {"a": ["bad host"]}, "DNS name or an IP address"),
        (["a"], {"a": ["x\0.com"]}, "DNS name or an IP address"),
    ],
)
def test_certs_init_refuses_before_it_writes(tmp_path, workers, hosts, says):
    with pytest.raises(SecurityError, match=says):
        write_deployment(tmp_path / "out", workers, hosts=hosts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lifetime", [timedelta(0), timedelta(days=-1), timedelta(days=90, seconds=1)])
def test_an_authority_lives_at_most_ninety_days(lifetime):
    with pytest.raises(SecurityError, match="at most 90 days"):
        Authority.create("x", lifetime=lifetime)


@pytest.mark.parametrize("scope", ["", ".", "-a", "a..b", "a/b", "a\n", "ü", "x" * 65])
def test_a_run_id_that_could_mean_something_else_is_refused(scope):
    with pytest.raises(SecurityError, match="run id"):
        Identity(scope, "worker-0")


def test_without_cryptography_the_message_names_the_extra(monkeypatch):
    for name in ("certificates", "authority", "handshake", "exchange"):
        monkeypatch.delitem(sys.modules, f"torchslicer.cluster.security.{name}", raising=False)
    monkeypatch.delattr(security, "certificates", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert security.JoinString.create("run-1", bytes(32), expires_at=2_000_000_000).run_id == "run-1"
    with pytest.raises(ConfigError, match=r"pip install 'torchslicer\[grpc\]'"):
        _ = security.Authority
