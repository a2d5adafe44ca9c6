"""RunConfig from environment variables, ours and those of the public 0.2.0."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from torchslicer.config import LEGACY_ENVIRONMENT, RunConfig
from torchslicer.errors import ConfigError

# One value for each documented variable, different from the default.
LEGACY_VALUES: dict[str, tuple[str, object]] = {
    "CHECKPOINT_DIR": ("/ck", "/ck"),
    "CHECKPOINT_ENABLED": ("1", True),
    "CHECKPOINT_RESUME": ("/ck/last", "/ck/last"),
    "CHECKPOINT_SAVE_EVERY": ("never", "never"),
    "COORDINATOR_ADDRESS": ("host:1", "host:1"),
    "COORDINATOR_BIND_ADDRESS": ("[::]:50054", "[::]:50054"),
    "DEVICE": ("cuda", "cuda"),
    "DISCOVERY_BACKEND": ("static", "static"),
    "DISCOVERY_REGISTRATION_DELAY": ("0.5", 0.5),
    "DISCOVERY_REGISTRATION_MAX_ATTEMPTS": ("7", 7),
    "DISCOVERY_REGISTRATION_RPC_TIMEOUT": ("1e-1", 0.1),
    "DISCOVERY_TIMEOUT": ("9", 9.0),
    "DISCOVERY_WATCHDOG_INTERVAL": ("2", 2.0),
    "EPOCHS": (" 5 ", 5),
    "FAULT_MAX_RETRIES": ("0", 0),
    "FAULT_TOLERANCE_ENABLED": ("true", True),
    "HEARTBEAT_INTERVAL": ("1.5", 1.5),
    "HEARTBEAT_TIMEOUT": ("0.25", 0.25),
    "KEEP_ALIVE": ("false", False),
    "LOG_DIR": ("/runs", "/runs"),
    "LOG_ENABLED": ("no", False),
    "LOG_LEVEL": ("debug", "DEBUG"),
    "MIXED_PRECISION": ("yes", True),
    "N_MICRO": ("9", 9),
    "N_WORKERS": ("6", 6),
    "PORT": ("7000", 7000),
    "PROFILE_MEMORY": ("True", True),
    "PROFILE_VERBOSITY": ("3", 3),
    "RUN_ID": ("run-7", "run-7"),
    "TENSOR_PORT_OFFSET": ("100", 100),
    "TENSOR_TRANSPORT": ("tcp", "tcp"),
    "USE_GPIPE": ("on", True),
    "WORKER_ADDRESS": ("worker-a:50051", "worker-a:50051"),
    "WORKER_INIT_DELAY": ("0", 0.0),
    "WORKER_INIT_MAX_ATTEMPTS": ("3", 3),
    "WORKER_INIT_RPC_TIMEOUT": ("4", 4.0),
    "WORKER_PEERS": ("a:1,b:2", ["a:1", "b:2"]),
    "WORKER_TAGS": ("gpu, fast", ["gpu", "fast"]),
    "WORKER_TAG_FILTER": ("a, b", ["a", "b"]),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LEGACY_ENVIRONMENT, "EXPERIMENT_CONFIG", *(n for n in os.environ if n.startswith("TORCHSLICER_"))]:
        monkeypatch.delenv(name, raising=False)


def value_at(config: RunConfig, dotted: str) -> object:
    value: object = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def test_every_documented_variable_is_tested() -> None:
    assert LEGACY_VALUES.keys() == LEGACY_ENVIRONMENT.keys()


@pytest.mark.parametrize("name", LEGACY_VALUES)
def test_each_legacy_variable_sets_its_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected = LEGACY_VALUES[name]
    key = LEGACY_ENVIRONMENT[name]
    assert value_at(RunConfig(), key) != expected
    monkeypatch.setenv(name, text)
    assert value_at(RunConfig.from_env(), key) == expected
    assert value_at(RunConfig.load(), key) == expected


def test_our_name_goes_before_the_legacy_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N_MICRO", "2")
    monkeypatch.setenv("TORCHSLICER_PIPELINE__NUM_MICROBATCHES", "8")
    monkeypatch.setenv("RUN_ID", "old")
    monkeypatch.setenv("TORCHSLICER_RUN_ID", "new")
    config = RunConfig.from_env()
    assert (config.pipeline.n_micro, config.run_id) == (8, "new")


def test_values_with_structure_are_json_or_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSLICER_TRAINING__OPTIMIZER", '{"name": "SGD", "params": {"lr": 1e-3, "nesterov": true}}')
    monkeypatch.setenv("TORCHSLICER_TRAINING__CRITERION", "mse")
    monkeypatch.setenv("TORCHSLICER_PIPELINE__CUTS", '["layer2", "a,b"]')
    monkeypatch.setenv("TORCHSLICER_DISCOVERY__PEERS", "[::1]:5000, b:5001")
    monkeypatch.setenv("TORCHSLICER_FAULT_TOLERANCE__PING_TIMEOUT_S", "1")
    config = RunConfig.from_env()
    assert config.training.optimizer == {"name": "SGD", "params": {"lr": 0.001, "nesterov": True}}
    assert config.training.criterion == {"name": "mse", "params": {}}
    assert config.pipeline.cuts == ["layer2", "a,b"]
    assert config.discovery.peers == ["[::1]:5000", "b:5001"]
    assert config.fault_tolerance.ping_timeout_s == 1.0


def test_yaml_goes_before_every_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("discovery: {tag_filter: [yaml]}\npipeline: {num_microbatches: 3}\n")
    monkeypatch.setenv("WORKER_TAG_FILTER", "a, b")
    monkeypatch.setenv("TORCHSLICER_DISCOVERY__TAG_FILTER", "c")
    monkeypatch.setenv("N_MICRO", "16")
    config = RunConfig.load(path)
    assert (config.discovery.tag_filter, config.pipeline.n_micro) == (["yaml"], 3)
    assert RunConfig.load(path, num_microbatches=5).pipeline.n_micro == 5
    assert RunConfig.load().discovery.tag_filter == ["c"]


def test_null_unsets_what_can_be_unset_and_empty_means_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_RESUME", "/ck")
    monkeypatch.setenv("TORCHSLICER_CHECKPOINT__RESUME", "null")
    monkeypatch.setenv("EPOCHS", "")
    config = RunConfig.from_env()
    assert (config.checkpoint.resume, config.training.epochs) == (None, 10)


def test_from_yaml_does_not_read_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: {seed: 1}\n")
    monkeypatch.setenv("EPOCHS", "5")
    assert RunConfig.from_yaml(path).training.epochs == 10


def test_experiment_config_names_the_file_when_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, epochs in (("env", 3), ("given", 4)):
        (tmp_path / f"{name}.yaml").write_text(f"training: {{epochs: {epochs}}}\n")
    monkeypatch.setenv("EXPERIMENT_CONFIG", str(tmp_path / "env.yaml"))
    assert RunConfig.load().training.epochs == 3
    assert RunConfig.load(tmp_path / "given.yaml").training.epochs == 4
    assert RunConfig.load(config_path=tmp_path / "given.yaml").training.epochs == 4
    assert RunConfig.from_env().training.epochs == 10


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EPOCHS", "many", "environment variable EPOCHS: training.epochs: expected a valid integer"),
        ("PORT", "tcp://10.0.0.1:80", "environment variable PORT: network.worker_port: expected a valid integer"),
        (
            "TORCHSLICER_PIPELINE__N_MICRO",
            "0",
            "environment variable TORCHSLICER_PIPELINE__N_MICRO: pipeline.n_micro: exp",
        ),
        ("TORCHSLICER_PIPELNE__N_MICRO", "2", "no such setting; did you mean 'TORCHSLICER_PIPELINE__N_MICRO'?"),
        ("TORCHSLICER_TRAINING__EPOCH", "2", "no such setting; did you mean 'TORCHSLICER_TRAINING__EPOCHS'?"),
        ("TORCHSLICER_TRAINING__OPTIMIZER", '{"name": ', "training.optimizer: expected a name or a JSON object"),
        ("TORCHSLICER_TRAINING__OPTIMIZER", '{"a":' * 20_000, "training.optimizer: expected a name or a JSON object"),
    ],
)
def test_variables_that_cannot_be_used(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig.from_env()


def test_other_variables_of_ours_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSLICER_TOKEN_FILE", "/run/token")
    assert RunConfig.from_env().training.epochs == 10


def test_keys_of_tls_are_given_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSLICER_NETWORK__TLS", '{"ca": "old", "cert": "c", "key": "k"}')
    monkeypatch.setenv("TORCHSLICER_NETWORK__TLS__CA", "/ca.pem")
    monkeypatch.setenv("TORCHSLICER_NETWORK__TLS__NAMES", "a, b")
    tls = RunConfig.from_env().network.tls
    assert (tls.files, tls.names) == (("/ca.pem", "c", "k"), ["a", "b"])
    path = tmp_path / "run.yaml"
    path.write_text("network: {tls: {cert: of-the-file}}\n")
    assert RunConfig.load(path).network.tls.files == ("/ca.pem", "of-the-file", "k")
    assert RunConfig.load(path, network__tls__key="mine", tls={"ca": "too"}).network.tls.files == (
        "too", "of-the-file", "mine",
    )  # fmt: skip
    monkeypatch.setenv("TORCHSLICER_NETWORK__TLS__CA", "null")
    assert RunConfig.from_env().network.tls.ca is None


def test_errors_in_keys_of_tls_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSLICER_NETWORK__TLS__CER", "c")
    with pytest.raises(ConfigError, match=r"TLS__CER: .*did you mean 'TORCHSLICER_NETWORK__TLS__CERT'"):
        RunConfig.from_env()
    monkeypatch.delenv("TORCHSLICER_NETWORK__TLS__CER")
    monkeypatch.setenv("TORCHSLICER_NETWORK__TLS__NAMES", "[1]")
    with pytest.raises(ConfigError, match=r"variable TORCHSLICER_NETWORK__TLS__NAMES: network\.tls\.names\[0\]"):
        RunConfig.from_env()


def test_data_ports_are_a_port_or_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in (("50061", 50061), ("50061-50064", "50061-50064"), ("null", None)):
        monkeypatch.setenv("TORCHSLICER_NETWORK__DATA_PORT", text)
        assert RunConfig.from_env().network.data_port == value
    monkeypatch.setenv("TORCHSLICER_NETWORK__DATA_PORT", "50061-")
    with pytest.raises(ConfigError, match=r"NETWORK__DATA_PORT: network\.data_port: .*a range such as 50061-50068"):
        RunConfig.from_env()
