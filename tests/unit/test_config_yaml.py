"""RunConfig as a YAML file: what loads, what is refused and with which line, scenarios S55 and S56, round trip."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from torchslicer.config import RunConfig
from torchslicer.errors import ConfigError

PUBLIC_FILE = """\
run_id: paper-run
training:
  epochs: 5
  optimizer: {name: Adam, params: {lr: 1e-3, betas: [0.9, 0.98]}}
  criterion: {name: CrossEntropyLoss, params: {label_smoothing: 0.1}}
  mixed_precision: true
pipeline: {use_gpipe: true, n_micro: 8}
discovery:
  backend: static
  n_workers: 3
  timeout: 90
  peers: ["10.0.0.2:50051", "worker-b:50051"]
  tag_filter: [gpu]
  registration_max_attempts: 4
  registration_delay_s: 0.5
  registration_rpc_timeout_s: 2
  watchdog_interval_s: 7.5
startup: {worker_init_max_attempts: 2, worker_init_delay_s: 0.1, worker_init_rpc_timeout_s: 1.5}
checkpoint: {enabled: true, dir: /data/ck, save_every: never, resume: /data/ck/last}
logging: {enabled: false, dir: /data/runs, level: DEBUG}
profile: {verbosity: 2, memory: true}
transport: {tensor: tcp, tensor_port_offset: 10}
fault_tolerance: {enabled: true, heartbeat_interval_s: 1, ping_timeout_s: 0.5, max_retries: 0}
network:
  device: cuda:0
  coordinator_address: coordinator:50054
  coordinator_bind_address: 127.0.0.1:6000
  worker_port: 6001
  worker_address: worker-a:6001
  worker_tags: [gpu, fast]
  keep_alive: false
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(path)
    return str(caught.value).replace(str(path), "run.yaml")


def test_a_file_with_every_public_name_loads_unchanged(tmp_path: Path) -> None:
    loaded = RunConfig.from_yaml(write(tmp_path, PUBLIC_FILE)).to_dict()
    expected = yaml.safe_load(PUBLIC_FILE.replace("1e-3", "0.001"))
    assert loaded.pop("run_id") == expected.pop("run_id") == "paper-run"
    assert loaded.keys() == expected.keys()
    for section, keys in expected.items():
        assert {key: loaded[section][key] for key in keys} == keys


def test_our_own_keys_load(tmp_path: Path) -> None:
    config = RunConfig.from_yaml(
        write(
            tmp_path,
            "training:\n"
            "  seed: 3\n  accumulate: 2\n  recompute: always\n  batch_norm: deferred\n  target_key: labels\n"
            "  max_grad_norm: 1\n  optimizer: adamw\n"
            "  scheduler: {name: StepLR, params: {step_size: 2}, interval: epoch}\n"
            "pipeline:\n  schedule: 1f1b\n  num_microbatches: 6\n  cuts: [layer2, layer4.0]\n  devices: cuda:0, cpu\n",
        )
    )
    training, pipeline = config.training, config.pipeline
    assert (training.seed, training.accumulate, training.recompute) == (3, 2, "always")
    assert (training.batch_norm, training.target_key, training.max_grad_norm) == ("deferred", "labels", 1.0)
    assert training.optimizer == {"name": "adamw", "params": {}}
    assert training.scheduler == {"name": "StepLR", "params": {"step_size": 2}, "interval": "epoch"}
    assert (pipeline.schedule, pipeline.n_micro) == ("1f1b", 6)
    assert (pipeline.cuts, pipeline.devices) == (["layer2", "layer4.0"], ["cuda:0", "cpu"])


def test_s55_numbers_and_truth_values_are_what_they_look_like(tmp_path: Path) -> None:
    text = """\
training:
  epochs: "3"
  mixed_precision: "false"
  optimizer: {name: SGD, params: {lr: 1e-4, weight_decay: 5e-4, momentum: "9e-1", nesterov: "false"}}
"""
    training = RunConfig.from_yaml(write(tmp_path, text)).training
    assert training.epochs == 3
    assert training.mixed_precision is False
    assert training.optimizer["params"] == {"lr": 0.0001, "weight_decay": 0.0005, "momentum": 0.9, "nesterov": False}
    assert training.optimizer["params"]["nesterov"] is False
    assert isinstance(training.optimizer["params"]["lr"], float)


def test_s55_wrong_types_name_key_line_value_and_expected_type(tmp_path: Path) -> None:
    message = refusal(tmp_path, "training:\n  seed: 1\n  epochs: many\n")
    assert message == (
        "run.yaml, line 3: training.epochs: expected a valid integer, unable to parse string as an integer, got 'many'"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipelne: {use_gpipe: true}\n", "run.yaml, line 1: pipelne: unknown key; did you mean 'pipeline'?"),
        ("pipeline:\n  n_mico: 3\n", "run.yaml, line 2: pipeline.n_mico: unknown key; did you mean 'n_micro'?"),
        ("epochs: 3\n", "run.yaml, line 1: epochs: unknown key; 'epochs' belongs to the section 'training'"),
        ("training:\n  n_micro: 3\n", "'n_micro' belongs to the section 'pipeline' (pipeline.n_micro)"),
        ("pipeline:\n  n_micro: 0\n", "run.yaml, line 2: pipeline.n_micro: expected greater than or equal to 1, got 0"),
        ("discovery: {timeout: -1}\n", "run.yaml, line 1: discovery.timeout: expected greater than 0, got -1"),
        (
            "pipeline:\n  use_gpipe: yes\n  schedule: 1f1b\n",
            "run.yaml, line 3: pipeline.schedule: use_gpipe: true contra",
        ),
        ("pipeline:\n  n_micro: 2\n  num_microbatches: 4\n", "run.yaml, line 3: pipeline.num_microbatches: num_"),
        (
            "training:\n  optimizer:\n    name: SGD\n    parms: {}\n",
            "run.yaml, line 4: training.optimizer.parms: unknown",
        ),
        (
            "training:\n  optimizer:\n    name: SGD\n    params:\n      lr: .nan\n",
            "line 5: training.optimizer.params.lr: ",
        ),
        ("discovery:\n  peers:\n    - a:1\n    - b\n", "run.yaml, line 4: discovery.peers[1]: expected 'HOST:PORT'"),
        ("training:\n  epochs: null\n", "run.yaml, line 2: training.epochs: expected a valid integer, got None"),
    ],
)
def test_s56_misspelt_impossible_and_contradictory_settings_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in refusal(tmp_path, text)


def test_s56_one_precedence_and_the_result_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "training: {epochs: 3}\n")
    monkeypatch.setenv("EPOCHS", "5")
    assert RunConfig.load().training.epochs == 5
    assert RunConfig.load(path).training.epochs == 3
    config = RunConfig.load(path, epochs=2)
    assert config.training.epochs == 2
    config.to_yaml(tmp_path / "resolved.yaml")
    assert RunConfig.from_yaml(tmp_path / "resolved.yaml") == config


def test_a_default_is_no_setting_but_a_value_equal_to_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHS", "5")
    assert RunConfig.load(write(tmp_path, "training: {epochs: 10}\n")).training.epochs == 10


def test_a_more_important_optimizer_inherits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSLICER_TRAINING__OPTIMIZER", '{"name": "SGD", "params": {"momentum": 0.5}}')
    path = write(tmp_path, "training: {optimizer: {name: Adam, params: {lr: 1e-2}}}\n")
    assert RunConfig.load().training.optimizer == {"name": "SGD", "params": {"momentum": 0.5}}
    assert RunConfig.load(path).training.optimizer == {"name": "Adam", "params": {"lr": 0.01}}
    assert RunConfig.load(path, lr=0.5).training.optimizer == {"name": "Adam", "params": {"lr": 0.5}}
    assert RunConfig.load(path, optimizer="sgd", lr=0.5).training.optimizer == {"name": "sgd", "params": {"lr": 0.5}}


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "---\n", "{}\n", "null\n", "training:\n", "\ufefftraining:\n"]
)
def test_empty_files_and_sections_are_the_defaults(tmp_path: Path, text: str) -> None:
    expected = RunConfig(run_id="r")
    loaded = RunConfig.from_yaml(write(tmp_path, text))
    loaded.run_id = "r"
    assert loaded == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training:\n  epochs: 1\n  epochs: 2\n", "run.yaml, line 3: the key 'epochs' is given in line 2 too"),
        ("training: {}\npipeline: {}\ntraining: {}\n", "run.yaml, line 3: the key 'training' is given in line 1 too"),
        ("- a\n- b\n", "run.yaml, line 1: expected sections such as 'training:', got ['a', 'b']"),
        ("just text\n", "run.yaml, line 1: expected sections such as 'training:'"),
        ("training: [1\n", "not valid YAML"),
        ("training:\n\tepochs: 1\n", "run.yaml, line 2: not valid YAML"),
        ("a: {}\n---\nb: {}\n", "not valid YAML"),
        ("pipeline: 3\n", "run.yaml, line 1: pipeline: expected keys and values, got 3"),
        ("1: {}\n", "run.yaml, line 1: expected a name as the key, got '1'"),
        ("training:\n  epochs: !!python/object/apply:os.system [ls]\n", "run.yaml, line 2: the tag"),
        ("training:\n  target_key: !!timestamp nonsense\n", "run.yaml, line 2: the tag"),
        ("training:\n  epochs: !!int many\n", "not valid YAML"),
        ("training:\n  mixed_precision: !!bool 7\n", "not valid YAML"),
        ("[" * 2000, "nested too deeply"),
        ("training: *nothing\n", "run.yaml, line 1: not valid YAML"),
        ("a: \x00\n", "not valid YAML"),
    ],
)
def test_files_that_are_not_plain_unambiguous_yaml(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_anchors_work_until_they_unfold_without_end(tmp_path: Path) -> None:
    shared = "discovery: &shared {timeout: 7}\n"
    loaded = RunConfig.from_yaml(write(tmp_path, shared + "startup: {}\ntraining: {epochs: &n 3, accumulate: *n}\n"))
    assert (loaded.discovery.timeout, loaded.training.accumulate) == (7.0, 3)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    assert "the anchors unfold to more" in refusal(tmp_path, bomb)
    assert "the anchors unfold to more" in refusal(tmp_path, "a: &a [*a]\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("0x10", 16), ("0o10", 8), ("1_000", 1000), ("7.0", 7)],
)
def test_integers_are_read_as_people_write_them(tmp_path: Path, text: str, value: int) -> None:
    assert RunConfig.from_yaml(write(tmp_path, f"training: {{epochs: {text}}}\n")).training.epochs == value


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("off", False), ("True", True), ("'0'", False), ("1", True)]
)
def test_truth_values_of_other_dialects(tmp_path: Path, text: str, value: bool) -> None:
    assert RunConfig.from_yaml(write(tmp_path, f"pipeline: {{use_gpipe: {text}}}\n")).pipeline.use_gpipe is value


def test_text_that_yaml_1_1_would_spoil_stays_text(tmp_path: Path) -> None:
    config = RunConfig.from_yaml(write(tmp_path, "run_id: 2024-01-02\ntraining: {target_key: no}\n"))
    assert (config.run_id, config.training.target_key) == ("2024-01-02", "no")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        RunConfig.load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.load(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"run_id: caf\xe9\n")
    with pytest.raises(ConfigError, match="expected UTF-8 text, found another byte at offset 11"):
        RunConfig.load(latin)
    long = write(tmp_path, "#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="expected a configuration of at most 1048576 bytes"):
        RunConfig.load(long)


def test_the_text_is_plain_yaml_for_others_too() -> None:
    config = RunConfig.create(run_id="r", target_key="no", lr=1e-5, cuts=["1e-4", "0o7", "1:30", "null", "~"])
    assert yaml.safe_load(config.to_yaml_text()) == config.to_dict()


_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
_awkward = st.sampled_from(
    ["1e-4", "true", "null", "~", "no", "010", "0x1", "- a", "a: b", "#x", " pad ", "<<", ".nan", "\x85"]
)
_texts = _names | _awkward
_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts
_plain = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3), max_leaves=6
)
_named = st.fixed_dictionaries({"name": _texts, "params": st.dictionaries(_texts, _plain, max_size=4)})
_positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
_configs = st.builds(
    RunConfig.create,
    run_id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True),
    epochs=st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
    optimizer=_named,
    criterion=_named,
    scheduler=st.none() | _named,
    max_grad_norm=st.none() | _positive,
    mixed_precision=st.booleans(),
    target_key=st.none() | _texts,
    schedule=st.none() | _texts,
    n_micro=st.integers(1, 1000),
    cuts=st.none() | st.lists(_texts, max_size=3),
    worker_tags=st.lists(_texts, max_size=3),
    device=st.sampled_from(["auto", "cpu", "cuda:3"]),
    discovery__timeout=_positive,
    checkpoint__dir=_texts,
    logging__level=st.sampled_from(["DEBUG", "warn"]),
)


@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(config=_configs)
def test_round_trip_is_exact(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "round.yaml"
    config.to_yaml(path)
    again = RunConfig.from_yaml(path)
    assert again == config
    assert again.to_dict() == config.to_dict()
    assert again.to_yaml_text() == config.to_yaml_text()
    assert RunConfig.model_validate(config.to_dict()) == config


@given(text=st.text(st.sampled_from(list("abc:-{}[]&*!|>'\"%@`,?#~\n \t01e.<")), max_size=60))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_loads_or_is_a_config_error(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with contextlib.suppress(ConfigError):
        assert RunConfig.from_yaml(path).training.epochs == 10
