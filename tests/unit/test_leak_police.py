from __future__ import annotations

import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import leak_police

LEAKY_TESTS = """
import os, socket, subprocess, sys, threading, multiprocessing
import pytest
from tests.support.leak_police import leak_police  # noqa: F401

kept = []
stop = threading.Event()

def test_thread():
    kept.append(threading.Thread(target=stop.wait, args=(60,), name="left-behind", daemon=False))
    kept[-1].start()

def test_daemon_thread():
    kept.append(threading.Thread(target=stop.wait, args=(60,), name="left-daemon", daemon=True))
    kept[-1].start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_multiprocessing():
    kept.append(multiprocessing.get_context("fork").Process(target=stop.wait, args=(60,), daemon=True))
    kept[-1].start()

def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_environment_set():
    os.environ["LEFT_BEHIND"] = "1"

def test_environment_removed():
    del os.environ["HOME"]

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("LEFT_BEHIND", "2")
    monkeypatch.chdir(tmp_path)
    worker = threading.Thread(target=int)
    worker.start()
    socket.create_server(("127.0.0.1", 0)).close()
    subprocess.run([sys.executable, "-c", ""], check=True)
    worker.join()

def test_fixture_is_cleaned_before_the_check(monkeypatch):
    assert "LEFT_BEHIND" not in os.environ
    assert "HOME" in os.environ

@pytest.fixture(scope="module")
def server():
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened

def test_module_fixture_is_not_a_leak(server):
    pass

def test_release():
    stop.set()
    for thing in kept:
        if isinstance(thing, subprocess.Popen):
            thing.communicate(b"\\n")
        elif isinstance(thing, multiprocessing.process.BaseProcess):
            thing.terminate()
            thing.join()
        elif isinstance(thing, threading.Thread):
            thing.join()
        else:
            thing.close()
"""

TORCH_TESTS = """
import torch
from tests.support.leak_police import leak_police  # noqa: F401

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_grad_mode():
    torch.set_grad_enabled(False)

def test_num_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)

def test_deterministic():
    torch.use_deterministic_algorithms(True)

def test_cudnn():
    torch.backends.cudnn.benchmark = True

def test_autocast():
    torch.set_autocast_enabled("cpu", True)

def test_anomaly():
    torch.autograd.set_detect_anomaly(True)

def test_clean():
    assert torch.get_default_dtype() is torch.float32
    with torch.no_grad():
        pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run tests in a process of their own; for each, what it was said to have left."""

    def run_tests(source: str) -> dict[str, str]:
        pytester.makepyfile(source)
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        plugins = [argument for name in ("randomly", "xdist", "cov") for argument in ("-p", f"no:{name}")]
        pytester.runpytest_subprocess(*plugins, "--junitxml=report.xml")
        report = ElementTree.parse(pytester.path / "report.xml")
        assert not list(report.iter("failure"))
        return {
            case.get("name", ""): "".join(error.get("message", "") for error in case.iter("error"))
            for case in report.iter("testcase")
        }

    return run_tests


def test_each_kind_of_leak_is_reported_and_taken_away(run):
    reported = run(LEAKY_TESTS)
    for name, words in {
        "test_thread": "thread 'left-behind' is still running",
        "test_daemon_thread": "thread 'left-daemon' is still running",
        "test_process": "is alive",
        "test_multiprocessing": "is alive",
        "test_socket": "is still open",
        "test_environment_set": "environment variable LEFT_BEHIND changed from '(unset)' to '1'",
        "test_environment_removed": "environment variable HOME changed from",
        "test_folder": "working directory changed from",
    }.items():
        assert words in reported.pop(name), name
    assert reported == {
        "test_clean": "",
        "test_fixture_is_cleaned_before_the_check": "",
        "test_module_fixture_is_not_a_leak": "",
        "test_release": "",
    }


def test_each_changed_switch_of_torch_is_reported_and_put_back(run):
    reported = run(TORCH_TESTS)
    for name, words in {
        "test_dtype": "torch default dtype changed from torch.float32 to torch.float64",
        "test_grad_mode": "torch grad mode changed from True to False",
        "test_num_threads": "torch number of threads changed",
        "test_deterministic": "torch deterministic algorithms changed from (False, False) to (True, False)",
        "test_cudnn": "torch cudnn (deterministic, benchmark) changed",
        "test_autocast": "torch CPU autocast changed from False to True",
        "test_anomaly": "torch anomaly detection changed from False to True",
    }.items():
        assert words in reported.pop(name), name
    assert reported == {"test_clean": ""}


def test_looking_is_cheap():
    fastest = min(_seconds_to_look() for _ in range(20))
    assert fastest < 0.005


def _seconds_to_look() -> float:
    start = time.perf_counter()
    leak_police.leaks(leak_police.take(), leak_police.take())
    return time.perf_counter() - start
