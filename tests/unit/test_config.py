"""RunConfig in Python: names, defaults, assignment, keyword arguments, secrets."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from torchslicer.config import RunConfig, Secret
from torchslicer.config.yamlio import to_yaml_text
from torchslicer.errors import ConfigError, UserError

# Names and defaults of the public 0.2.0, which users' scripts and files rely on.
PUBLIC_DEFAULTS: dict[str, dict[str, object]] = {
    "training": {
        "epochs": 10,
        "optimizer": {"name": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}},
        "criterion": {"name": "CrossEntropyLoss", "params": {}},
        "mixed_precision": False,
    },
    "pipeline": {"use_gpipe": False, "n_micro": 4},
    "discovery": {
        "backend": "coordinator",
        "n_workers": 2,
        "timeout": 60.0,
        "peers": [],
        "tag_filter": [],
        "registration_max_attempts": 30,
        "registration_delay_s": 3.0,
        "registration_rpc_timeout_s": 5.0,
        "watchdog_interval_s": 15.0,
    },
    "startup": {"worker_init_max_attempts": 20, "worker_init_delay_s": 1.0, "worker_init_rpc_timeout_s": 5.0},
    "checkpoint": {"enabled": False, "dir": "./checkpoints", "save_every": "epoch", "resume": None},
    "logging": {"enabled": True, "dir": "./runs", "level": "INFO"},
    "profile": {"verbosity": 0, "memory": False},
    "transport": {"tensor": "grpc", "tensor_port_offset": 1},
    "fault_tolerance": {"enabled": False, "heartbeat_interval_s": 5.0, "ping_timeout_s": 3.0, "max_retries": 3},
    "network": {
        "device": "auto",
        "coordinator_address": None,
        "coordinator_bind_address": "0.0.0.0:50054",
        "worker_port": 50051,
        "worker_address": None,
        "worker_tags": [],
        "keep_alive": True,
    },
}
OUR_DEFAULTS: dict[str, dict[str, object]] = {
    "training": {
        "seed": 0,
        "scheduler": None,
        "max_grad_norm": None,
        "accumulate": 1,
        "recompute": "never",
        "batch_norm": "per_microbatch",
        "target_key": None,
    },
    "pipeline": {"schedule": None, "strategy": "uniform", "cuts": None, "devices": None},
    "network": {"tls": {"ca": None, "cert": None, "key": None, "names": []}, "insecure": False, "data_port": None},
}


def test_defaults_are_the_public_ones_and_ours() -> None:
    expected = {name: {**keys, **OUR_DEFAULTS.get(name, {})} for name, keys in PUBLIC_DEFAULTS.items()}
    assert RunConfig(run_id="r").to_dict() == {"run_id": "r", **expected}


def test_create_takes_the_public_keywords() -> None:
    config = RunConfig.create(
        run_id="exp-1",
        epochs=3,
        optimizer="Adam",
        lr=1e-3,
        criterion="MSELoss",
        mixed_precision=True,
        use_gpipe=True,
        n_micro=8,
        n_workers=4,
        transport="tcp",
        device="cuda:1",
        coordinator_address="10.0.0.1:50054",
        worker_port=6000,
        worker_tags=["gpu"],
        keep_alive=False,
    )
    assert config.run_id == "exp-1"
    assert config.training.epochs == 3
    assert config.training.optimizer == {"name": "Adam", "params": {"lr": 1e-3}}
    assert config.training.criterion == {"name": "MSELoss", "params": {}}
    assert (config.training.mixed_precision, config.pipeline.use_gpipe, config.pipeline.n_micro) == (True, True, 8)
    assert (config.discovery.n_workers, config.transport.tensor) == (4, "tcp")
    assert (config.network.device, config.network.coordinator_address) == ("cuda:1", "10.0.0.1:50054")
    assert (config.network.worker_port, config.network.worker_tags, config.network.keep_alive) == (6000, ["gpu"], False)


def test_create_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHS", "77")
    monkeypatch.setenv("TORCHSLICER_PIPELINE__N_MICRO", "77")
    assert RunConfig.create().training.epochs == 10
    assert RunConfig().pipeline.n_micro == 4


def test_lr_alone_changes_only_the_rate_of_the_default_optimizer() -> None:
    params = RunConfig.create(lr=0.2).training.optimizer["params"]
    assert params == {"lr": 0.2, "momentum": 0.9, "weight_decay": 5e-4}


def test_keywords_reach_every_key() -> None:
    config = RunConfig.create(logging__level="debug", checkpoint={"enabled": True, "dir": Path("ck")})
    assert config.logging.level == "DEBUG"
    assert (config.checkpoint.enabled, config.checkpoint.dir) == (True, "ck")


def test_none_as_a_keyword_means_not_given() -> None:
    assert RunConfig.create(epochs=None, coordinator_address=None).training.epochs == 10
    assert RunConfig.create(run_id=None).run_id


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"epoch": 3}, "keyword argument epoch: there is no such setting; did you mean 'epochs'?"),
        ({"n_micro": 2, "num_microbatches": 4}, "two names of pipeline.n_micro and differ"),
        ({"optimizer": {"name": "SGD", "params": {"lr": 1.0}}, "lr": 0.5}, "0.5 contradicts the lr 1.0"),
        ({"training": {"epoch": 3}}, "training.epoch: unknown key; did you mean 'epochs'?"),
        ({"training": 3}, "keyword argument training: expected a mapping of the keys of this section, got 3"),
    ],
)
def test_keywords_that_cannot_be_meant(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig.create(**keywords)


def test_attributes_are_assignable_and_checked() -> None:
    config = RunConfig(run_id="r")
    config.training.epochs = 20
    config.training.optimizer = "adamw"  # type: ignore[assignment]
    config.pipeline.num_microbatches = 7
    config.network.worker_tags = "a, b"  # type: ignore[assignment]
    config.logging = {"level": "warn"}  # type: ignore[assignment]
    assert config.training.epochs == 20
    assert config.training.optimizer == {"name": "adamw", "params": {}}
    assert config.pipeline.n_micro == config.pipeline.num_microbatches == 7
    assert config.network.worker_tags == ["a", "b"]
    assert config.logging.level == "WARNING"


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("training", "epochs", 0, "training.epochs: expected greater than or equal to 1, got 0"),
        ("training", "epochs", True, "training.epochs: expected a number, got True"),
        ("training", "epochs", 2.5, "training.epochs: expected a valid integer"),
        ("training", "epoch", 3, "training.epoch: unknown key; did you mean 'epochs'?"),
        ("training", "mixed_precision", "maybe", "training.mixed_precision: expected a valid boolean"),
        ("training", "max_grad_norm", 0.0, "training.max_grad_norm: expected greater than 0, got 0.0"),
        ("training", "max_grad_norm", float("nan"), "training.max_grad_norm: expected a finite number"),
        ("training", "recompute", "sometimes", "training.recompute: expected 'never', 'except_last' or 'always'"),
        ("training", "optimizer", 3, "training.optimizer: expected a name or a mapping"),
        ("training", "optimizer", {"params": {}}, "training.optimizer.name: this key is required"),
        ("training", "optimizer", {"name": "SGD", "parms": {}}, "training.optimizer.parms: unknown key; did you mean"),
        ("training", "optimizer", {"name": "SGD", "lr": 1}, "lr: unknown key; an option of it goes under params"),
        (
            "training",
            "optimizer",
            {"name": "SGD", "params": {"lr": object()}},
            "training.optimizer.params.lr: expected",
        ),
        ("training", "scheduler", {"params": {}}, "training.scheduler.name: this key is required"),
        ("pipeline", "n_micro", 0, "pipeline.n_micro: expected greater than or equal to 1, got 0"),
        ("pipeline", "devices", ["cuda:0", "gpu"], "pipeline.devices[1]: expected a device such as"),
        ("discovery", "timeout", 0, "discovery.timeout: expected greater than 0, got 0"),
        ("discovery", "n_workers", -1, "discovery.n_workers: expected greater than or equal to 1, got -1"),
        ("discovery", "peers", ["host"], "discovery.peers[0]: expected 'HOST:PORT'"),
        ("discovery", "backend", "static ", "discovery.backend: expected 'coordinator' or 'static'"),
        ("network", "device", "gpu", "did you mean 'cuda'?"),
        ("network", "device", "cuda0", "network.device: expected 'auto' or a device"),
        ("network", "device", "cuda:", "network.device: expected 'auto' or a device"),
        ("network", "coordinator_address", "host:99999", "network.coordinator_address: expected 'HOST:PORT'"),
        ("network", "worker_port", 70000, "network.worker_port: expected less than or equal to 65535"),
        ("logging", "level", "LOUD", "logging.level: expected 'DEBUG', 'INFO', 'WARNING', 'ERROR' or 'CRITICAL'"),
        ("profile", "verbosity", 4, "profile.verbosity: expected less than or equal to 3, got 4"),
        ("fault_tolerance", "max_retries", -1, "fault_tolerance.max_retries: expected greater than or equal to 0"),
    ],
)
def test_refused_assignments_say_why_and_change_nothing(section: str, key: str, value: object, message: str) -> None:
    config = RunConfig(run_id="r")
    before = config.to_dict()
    with pytest.raises(ConfigError, match=re.escape(message)):
        setattr(getattr(config, section), key, value)
    assert config.to_dict() == before


def test_contradictions_are_refused_and_leave_the_section_as_it_was() -> None:
    config = RunConfig(run_id="r", pipeline={"use_gpipe": True})
    with pytest.raises(ConfigError, match=r"pipeline\.schedule: use_gpipe: true contradicts schedule: 1f1b"):
        config.pipeline.schedule = "1f1b"
    assert config.pipeline.schedule is None
    config.pipeline.schedule = "gpipe"
    with pytest.raises(ConfigError, match=r"pipeline\.cuts: cuts contradicts strategy: time"):
        RunConfig.create(cuts=["layer2"], strategy="time")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.model_validate({"training": {"epochs": 0}, "pipelne": {}, "epochs": 3})
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 settings cannot be used:"
    assert lines[1] == "  training.epochs: expected greater than or equal to 1, got 0"
    assert lines[2].startswith("  pipelne: unknown key; did you mean 'pipeline'?")
    assert lines[3] == "  epochs: unknown key; 'epochs' belongs to the section 'training' (training.epochs)"
    assert isinstance(caught.value, UserError)
    assert caught.value.exit_code == 2


def test_model_validate_raises_config_errors_too() -> None:
    with pytest.raises(ConfigError, match=r"pipeline: expected a valid dictionary"):
        RunConfig.model_validate({"pipeline": [1]})


def test_num_microbatches_is_another_spelling_everywhere() -> None:
    assert RunConfig(pipeline={"num_microbatches": 3}).pipeline.n_micro == 3
    assert RunConfig.create(num_microbatches=3, n_micro=3).pipeline.n_micro == 3
    with pytest.raises(ConfigError, match="num_microbatches and n_micro are two names of one setting"):
        RunConfig(pipeline={"num_microbatches": 3, "n_micro": 4})


@pytest.mark.parametrize("run_id", ["a", "A.b_c-9", "0" * 64])
def test_run_ids_that_are_good_folder_names(run_id: str) -> None:
    assert RunConfig(run_id=run_id).run_id == run_id


@pytest.mark.parametrize("run_id", ["", ".a", "a..b", "a/b", "a b", "-a", "a\n", "é", "0" * 65, 7])
def test_run_ids_that_are_not(run_id: object) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        RunConfig(run_id=run_id)


def test_generated_run_ids_differ_and_follow_the_pattern() -> None:
    first, second = RunConfig().run_id, RunConfig.create().run_id
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", first)
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", second)


def test_to_dict_is_a_copy_and_defaults_are_not_shared() -> None:
    config = RunConfig()
    config.to_dict()["training"]["optimizer"]["params"]["lr"] = 9.0
    config.network.worker_tags.append("x")
    assert config.training.optimizer["params"]["lr"] == 0.05
    assert RunConfig().network.worker_tags == []


def test_a_config_can_be_pickled_and_copied() -> None:
    config = RunConfig.create(run_id="r", epochs=3)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_importing_the_configuration_does_not_import_torch() -> None:
    source = str(Path(__file__).parents[2] / "src" / "torchslicer")
    # a bare package stands in for torchslicer/__init__.py, which may import torch
    code = (
        "import sys, types\n"
        "package = types.ModuleType('torchslicer')\n"
        f"package.__path__ = [{source!r}]\n"
        "sys.modules['torchslicer'] = package\n"
        "import torchslicer.config, torchslicer.runlog\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


class _WithToken(BaseModel):
    token: Secret


def test_a_secret_never_shows() -> None:
    secret = Secret("hunter2")
    held = _WithToken(token="hunter2")
    shown = [repr(secret), str(secret), f"{secret}", f"{[secret]}", repr(held), held.model_dump_json()]
    shown += [
        json.dumps(held.model_dump(mode="json")),
        to_yaml_text({"token": secret}),
        to_yaml_text(held.model_dump()),
    ]
    assert all("***" in text and "hunter2" not in text for text in shown)
    assert held.token.reveal() == "hunter2"
    assert yaml.safe_load(to_yaml_text({"token": secret})) == {"token": "***"}


def test_a_secret_is_not_pickled_but_compares_and_copies() -> None:
    secret = Secret("hunter2")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)
    assert secret == Secret("hunter2") != Secret("other")
    assert secret != "hunter2"
    assert len({secret, Secret("hunter2")}) == 1
    assert copy.copy(secret) is copy.deepcopy(secret) is secret
