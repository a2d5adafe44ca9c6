"""The files of `deploy/`: what can be checked without a Docker engine, a cluster or SLURM."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from torchslicer.cli import main
from torchslicer.cluster.ports import port_pairs
from torchslicer.config import RunConfig
from torchslicer.config.sections import TlsSection

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLES = ROOT / "examples" / "train"
DOCKERFILES = ["Dockerfile", "Dockerfile.cuda"]


def parsed(*command: str) -> dict[str, Any]:
    """Parse a command of the command line, without running it; unknown options and wrong values raise."""
    group: Any = main
    context = click.Context(main, info_name="torchslicer")
    words = list(command)
    while isinstance(group, click.Group):
        name = words.pop(0)
        found = group.get_command(context, name)
        assert found is not None, f"there is no command {name!r}"
        group, context = found, click.Context(found, info_name=name, parent=context)
    group.parse_args(context, words)
    return context.params


def options_of_example(script: str) -> set[str]:
    """Return the options that an example declares."""
    return set(re.findall(r'add_argument\("(--[\w-]+)"', (EXAMPLES / script).read_text(encoding="utf-8")))


def check_example(words: list[str], folder: Path) -> None:
    """Check the arguments of `coordinator.py`."""
    assert words[0] == "coordinator.py"
    used = {word for word in words if word.startswith("--")}
    assert used <= options_of_example("coordinator.py")
    RunConfig.load(folder / words[1])


def instructions(name: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def manifests() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {f"{entry['kind']}/{entry['metadata']['name']}": entry for entry in found}


def pod(kind_and_name: str) -> dict[str, Any]:
    return manifests()[kind_and_name]["spec"]["template"]["spec"]


# -- commands ------------------------------------------------------------------------------------------------


def test_the_check_of_commands_sees_a_wrong_option():
    with pytest.raises(click.NoSuchOption):
        parsed("worker", "--coordinater", "a:1")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_start_a_worker_and_do_not_run_as_root(name):
    found = instructions(name)
    kinds = [kind for kind, _ in found]
    [entry] = [json.loads(value) for kind, value in found if kind == "ENTRYPOINT"]
    assert entry == ["torchslicer", "worker"]
    parsed(entry[1])
    assert [value for kind, value in found if kind == "USER"][-1] == "1000:1000"
    assert kinds.index("USER") > max(index for index, kind in enumerate(kinds) if kind == "RUN")
    assert "HEALTHCHECK" not in kinds
    assert "ADD" not in kinds
    assert kinds[0] in ("FROM", "ARG")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_pin_their_base_keep_no_cache_and_copy_what_is_there(name):
    found = instructions(name)
    arguments = dict(value.split("=", 1) for kind, value in found if kind == "ARG")
    [base] = [value for kind, value in found if kind == "FROM"]
    base = arguments[base[2:-1]] if base.startswith("${") else base
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", base)
    assert not base.endswith(":latest")
    for kind, value in found:
        if kind == "RUN":
            assert value.count("pip install") == value.count("--no-cache-dir")
            assert "sudo" not in value
        if kind == "COPY":
            for source in value.split()[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}" in (DEPLOY / f"{name}.dockerignore").read_text(encoding="utf-8").split()


def test_the_dockerfile_installs_the_torch_of_the_tests():
    pinned = re.search(r"^torch==\S+", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    arguments = dict(value.split("=", 1) for kind, value in instructions("Dockerfile") if kind == "ARG")
    assert pinned is not None
    assert arguments["TORCH"] == pinned[0]


# -- Compose -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["worker-0", "worker-1"])
def test_compose_workers_have_commands_that_parse(service):
    options = parsed("worker", *compose()["services"][service]["command"])
    assert options["coordinator"] == "coordinator:50054"
    assert options["trust"] == ("models",)
    assert compose()["services"][service]["environment"]["PYTHONPATH"] == "/train"


def test_the_coordinator_of_compose_listens_where_workers_connect():
    service = compose()["services"]["coordinator"]
    check_example(["coordinator.py", *service["command"]], EXAMPLES)
    assert service["entrypoint"] == ["python", "coordinator.py"]
    assert service["command"][service["command"].index("--bind") + 1].endswith(":50054")
    workers = [name for name in compose()["services"] if name.startswith("worker")]
    assert service["command"][service["command"].index("--workers") + 1] == str(len(workers))


@pytest.mark.parametrize("service", ["coordinator", "worker-0", "worker-1"])
def test_compose_mounts_what_is_used_and_uses_what_is_mounted(service):
    found = compose()["services"][service]
    words = " ".join([*found["command"], *map(str, found["environment"].values())])
    used = set(re.findall(r"/run/secrets/([\w.-]+)", words))
    assert used == set(found["secrets"]) == {"ca.pem", f"{service}.pem", f"{service}.key"}
    assert used <= set(compose()["secrets"])
    [volume] = found["volumes"]
    source, target, mode = volume.split(":")
    assert (DEPLOY / source).is_dir()
    assert target == found["working_dir"]
    assert mode == "ro"


def test_compose_containers_have_no_more_rights_than_they_need():
    for service in compose()["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "ports" not in service
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_secrets_of_compose_are_the_files_of_certs_init():
    command = re.search(r"torchslicer (certs init .*)", (DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert command is not None
    options = parsed(*shlex.split(command[1]))
    nodes = ["coordinator", *options["workers"].split(",")]
    made = {"ca.pem", *(f"{node}.{end}" for node in nodes for end in ("pem", "key"))}
    assert set(compose()["secrets"]) == made
    folder = ROOT / options["out"]
    assert {(DEPLOY / entry["file"]).resolve() for entry in compose()["secrets"].values()} == {
        folder / name for name in made
    }


# -- Kubernetes ----------------------------------------------------------------------------------------------


def test_manifests_have_what_the_api_server_asks_for():
    assert sorted(manifests()) == [
        "Job/torchslicer-coordinator", "Service/torchslicer-coordinator", "Service/torchslicer-worker",
        "StatefulSet/torchslicer-worker",
    ]  # fmt: skip
    versions = {"Job": "batch/v1", "Service": "v1", "StatefulSet": "apps/v1"}
    for entry in manifests().values():
        assert entry["apiVersion"] == versions[entry["kind"]]
        assert re.fullmatch(r"[a-z0-9-]{1,63}", entry["metadata"]["name"])
        assert entry["spec"]


def test_selectors_and_services_meet_the_pods():
    found = manifests()
    for kind, name in (("Job", "torchslicer-coordinator"), ("StatefulSet", "torchslicer-worker")):
        template = found[f"{kind}/{name}"]["spec"]["template"]
        service = found[f"Service/{name}"]["spec"]
        assert service["selector"].items() <= template["metadata"]["labels"].items()
        [container] = template["spec"]["containers"]
        assert {entry["name"]: entry["containerPort"] for entry in container["ports"]} == {
            port["targetPort"]: port["port"] for port in service["ports"]
        }
    workers = found["StatefulSet/torchslicer-worker"]["spec"]
    assert workers["selector"]["matchLabels"] == workers["template"]["metadata"]["labels"]
    assert f"Service/{workers['serviceName']}" in found


def test_kubernetes_workers_have_a_command_that_parses():
    [container] = pod("StatefulSet/torchslicer-worker")["containers"]
    assert container["command"] == ["torchslicer", "worker"]
    options = parsed("worker", *container["args"])
    assert options["coordinator"] == "torchslicer-coordinator:50054"
    assert port_pairs(options["data_port"]) == (tuple(entry["containerPort"] for entry in container["ports"]),)
    assert str(options["threads"]) == container["resources"]["limits"]["cpu"]
    check_example([*pod("Job/torchslicer-coordinator")["containers"][0]["command"][1:],
                   *pod("Job/torchslicer-coordinator")["containers"][0]["args"]], EXAMPLES / "experiments")  # fmt: skip


@pytest.mark.parametrize("name", ["Job/torchslicer-coordinator", "StatefulSet/torchslicer-worker"])
def test_kubernetes_mounts_what_is_used_and_uses_what_is_mounted(name):
    [container] = pod(name)["containers"]
    volumes = {entry["name"]: entry for entry in pod(name)["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    words = " ".join([*container["args"], *(str(entry.get("value")) for entry in container["env"])])
    used = set(re.findall(r"/certs/[\w.-]+", words))
    mounted = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "certs"}
    assert used
    assert all(any(path == mount or path.startswith(mount + "/") for mount in mounted) for path in used)
    if mounted != {"/certs"}:
        assert mounted == used
    assert volumes["certs"]["secret"]["defaultMode"] == 0o440
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    assert f"create secret generic {volumes['certs']['secret']['secretName']} " in text
    assert f"create configmap {volumes['train']['configMap']['name']} " in text


@pytest.mark.parametrize("name", ["Job/torchslicer-coordinator", "StatefulSet/torchslicer-worker"])
def test_pods_are_not_root_and_have_limits(name):
    [container] = pod(name)["containers"]
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    assert pod(name)["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert any(key.endswith("Probe") for key in container)


def test_certificates_of_kubernetes_have_the_names_of_the_pods():
    command = re.search(r"torchslicer (certs init .*)", (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert command is not None
    workers = manifests()["StatefulSet/torchslicer-worker"]
    pods = [f"{workers['metadata']['name']}-{index}" for index in range(workers["spec"]["replicas"])]
    assert parsed(*shlex.split(command[1]))["workers"].split(",") == pods


@pytest.mark.parametrize("text", [
    compose()["services"]["coordinator"]["environment"]["TORCHSLICER_NETWORK__TLS"],
    next(entry["value"] for entry in pod("Job/torchslicer-coordinator")["containers"][0]["env"]),
])  # fmt: skip
def test_coordinators_find_their_certificates_by_the_environment(text, monkeypatch):
    monkeypatch.setenv("TORCHSLICER_NETWORK__TLS", text)
    assert RunConfig.load().network.tls.files == TlsSection(**json.loads(text)).files


# -- SLURM ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_is_bash():
    done = subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_of_the_slurm_script_parse():
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "slurm.sh").read_text(encoding="utf-8"))
    [worker] = re.findall(r"exec torchslicer (worker .*)", text)
    words = ["8" if word == "$SLURM_CPUS_PER_TASK" else word for word in shlex.split(worker)]
    assert parsed(*words)["once"] is True
    [certs] = re.findall(r"torchslicer (certs init .*) >", text)
    parsed(*shlex.split(certs))
    assert set(re.findall(r" (--[\w-]+)", text[text.rindex("python ") :])) <= options_of_example("coordinator.py")


def test_the_slurm_script_names_certificates_as_certs_init_does():
    text = (DEPLOY / "slurm.sh").read_text(encoding="utf-8")
    assert "'worker-%03g'" in text
    assert '"worker-%03d"' in text
