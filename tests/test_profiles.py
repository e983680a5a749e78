"""Profiles: what a file may say, and what the compiled pipelines ask a cluster for."""

import json
import re

import pytest

from pipelines.bind import trainjob_text
from pipelines.commands import COMPILED, compile_pipelines, compiled_name
from pipelines.compile import compile_text
from pipelines.ir import Compiled, dangling
from pipelines.profiles import BUILT_IN, Profile, load_profile
from thawline.errors import ConfigError
from thawline.stages.task import read_config
from thawline.stages.trainjob.settings import TrainJobSettings

BYTE_BUDGET = 64 * 1024
"""Kubeflow refuses a workflow of 1.5 MiB, which holds the pipeline several times over."""
STAGES = {"start", "windows", "pretrain", "finetune", "evaluate", "register", "finish"}
REFERENCES = {"MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"}
CREDENTIALS = {
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
}
on_a_cluster = pytest.mark.parametrize("name", ["cpu", "gpu", "gpu-multinode"])


@pytest.fixture(scope="module")
def texts():
    return {name: (COMPILED / compiled_name(name)).read_text("utf-8") for name in BUILT_IN}


@pytest.fixture(scope="module")
def compiled(texts):
    return {name: Compiled.parse(text) for name, text in texts.items()}


def containers(compiled):
    return {
        name.removeprefix("exec-"): each.container
        for name, each in compiled.deployment.executors.items()
    }


def pods(compiled):
    return {name.removeprefix("exec-"): each for name, each in compiled.kubernetes.items()}


def gpu_stages(compiled):
    return {name for name, each in containers(compiled).items() if each.resources.accelerator.count}


def tasks(compiled):
    dags = [component.dag.tasks for component in compiled.components().values()]
    return {name: task for dag in dags for name, task in dag.items() if name in STAGES}


# The policy that every compiled file keeps.


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_file_is_small_resolves_and_installs_nothing(texts, compiled, name):
    assert len(texts[name].encode()) < BYTE_BUDGET
    assert dangling(compiled[name]) == []
    assert containers(compiled[name]).keys() == pods(compiled[name]).keys() == STAGES
    for container in containers(compiled[name]).values():
        assert "pip" not in " ".join(container.command).replace("pipeline", "")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_image_is_pinned(compiled, name):
    for container in containers(compiled[name]).values():
        assert re.fullmatch(r"thawline:0\.1\.0-(cpu|gpu)", container.image)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_variable_in_clear_holds_an_address_or_a_secret(texts, compiled, name):
    told = {"THAWLINE_DEVICE", "THAWLINE_WORK"}
    for container in containers(compiled[name]).values():
        assert {variable.name for variable in container.env} <= told
    assert not re.search(r"://[^/\s'\"]*:[^/\s'\"]*@", texts[name])


@on_a_cluster
def test_addresses_come_from_a_config_map_and_credentials_from_secrets(compiled, name):
    for pod in pods(compiled[name]).values():
        maps = {pair.env_var for source in pod.config_map_as_env for pair in source.key_to_env}
        secrets = {pair.env_var for source in pod.secret_as_env for pair in source.key_to_env}
        assert (maps, secrets) == (REFERENCES, CREDENTIALS)


@on_a_cluster
def test_every_task_has_bounds_and_is_tried_again(compiled, name):
    for task in containers(compiled[name]).values():
        resources = task.resources
        assert resources.resource_cpu_request
        assert resources.resource_memory_request
        assert resources.resource_memory_limit
    for pod in pods(compiled[name]).values():
        assert 0 < pod.active_deadline_seconds <= 172_800
    retries = {
        stage: task.retry_policy.max_retry_count for stage, task in tasks(compiled[name]).items()
    }
    assert retries == {stage: 5 if stage in ("finetune", "finish") else 2 for stage in STAGES}


@on_a_cluster
def test_a_run_has_a_deadline_and_its_workflow_is_not_kept_for_ever(texts, name):
    assert "    pipelineConfig:\n      activeDeadlineSeconds: 259200\n" in texts[name]
    assert "      resourceTtlOnCompletion: 604800\n" in texts[name]


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("local", set()),
        ("cpu", set()),
        ("gpu", {"pretrain", "finetune", "evaluate"}),
        ("gpu-multinode", {"pretrain", "evaluate"}),
    ],
)
def test_a_gpu_task_has_all_that_a_gpu_task_needs_and_no_other_task_has(compiled, name, stages):
    assert gpu_stages(compiled[name]) == stages
    for stage, container in containers(compiled[name]).items():
        pod = pods(compiled[name])[stage]
        accelerator = container.resources.accelerator
        variables = {each.name: each.value for each in container.env}
        if stage not in stages:
            assert not pod.tolerations
            assert not pod.node_selector.labels
            assert not pod.empty_dir_mounts
            assert container.image == "thawline:0.1.0-cpu"
            continue
        assert (accelerator.type, accelerator.count) == ("nvidia.com/gpu", 1)
        assert accelerator.resource_type == "nvidia.com/gpu"
        assert accelerator.resource_count == "1"
        assert container.image == "thawline:0.1.0-gpu"
        assert dict(pod.node_selector.labels) == {"nvidia.com/gpu.present": "true"}
        (toleration,) = pod.tolerations
        assert (toleration.key, toleration.operator, toleration.effect) == (
            "nvidia.com/gpu",
            "Exists",
            "NoSchedule",
        )
        (memory,) = pod.empty_dir_mounts
        assert (memory.mount_path, memory.medium) == ("/dev/shm", "Memory")  # noqa: S108
        assert memory.size_limit == "8Gi"
        assert pod.active_deadline_seconds
        assert tasks(compiled[name])[stage].retry_policy.max_retry_count
        assert variables["THAWLINE_DEVICE"] == "cuda"


@on_a_cluster
def test_fine_tuning_has_the_shared_volume_for_its_checkpoints(compiled, name):
    (mount,) = pods(compiled[name])["finetune"].pvc_mount
    assert mount.mount_path == "/work"
    assert mount.pvc_name_parameter.runtime_value.constant.string_value == "thawline-work"
    variables = {each.name: each.value for each in containers(compiled[name])["finetune"].env}
    assert variables["THAWLINE_WORK"] == "/work"
    others = {stage for stage, pod in pods(compiled[name]).items() if pod.pvc_mount}
    assert others == {"finetune"}


def test_only_the_profile_of_many_nodes_hands_fine_tuning_a_trainjob(compiled):
    given = {
        name: tasks(each)["finetune"].inputs.parameters["trainjob"].runtime_value.constant
        for name, each in compiled.items()
    }
    assert {name for name, value in given.items() if value.string_value} == {"gpu-multinode"}
    settings = TrainJobSettings.model_validate_json(given["gpu-multinode"].string_value)
    assert (settings.nodes, settings.processes) == (2, 8)
    assert settings.image == "thawline:0.1.0-gpu"
    assert settings.work.claim == "thawline-work"
    assert {name for keys in settings.secrets.values() for name in keys.values()} == CREDENTIALS
    variables = {
        each.name: each.value for each in containers(compiled["gpu-multinode"])["finetune"].env
    }
    assert variables["THAWLINE_DEVICE"] == "cuda"


def test_no_resource_is_an_input_of_the_pipeline(texts):
    for text in texts.values():
        assert "resourceMemoryRequest: '{{" not in text
        assert "Limit: '{{" not in text


# A profile of one's own.


def write(folder, text, name="mine"):
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_says_what_differs_from_another_profile(tmp_path):
    write(tmp_path, "extends: gpu\nimage_pull_secrets: [registry]\n", "team")
    mine = write(
        tmp_path,
        "extends: team.yaml\n"
        "work: {folder: 's3://bucket/work', claim: null}\n"
        "secrets: {thawline-mlflow: null}\n"
        "env: {NCCL_DEBUG: WARN}\n"
        "stages:\n"
        "  finetune: {memory: 100Gi, accelerator: {count: 4}}\n",
    )
    profile = load_profile(mine)
    assert profile.name == "mine"
    finetune, pretrain = profile.stage("finetune"), profile.stage("pretrain")
    assert (finetune.memory, finetune.accelerator.count, finetune.cpu) == ("100Gi", 4, "8")
    assert (pretrain.memory, pretrain.accelerator.count) == ("32Gi", 1)
    made = Compiled.parse(compile_text(profile))
    assert containers(made)["finetune"].resources.accelerator.resource_count == "4"
    pod = pods(made)["finetune"]
    assert not pod.pvc_mount
    assert [each.secret_name for each in pod.image_pull_secret] == ["registry"]
    assert [each.secret_name for each in pod.secret_as_env] == ["thawline-object-store"]
    variables = {each.name: each.value for each in containers(made)["finetune"].env}
    assert variables == {
        "NCCL_DEBUG": "WARN",
        "THAWLINE_DEVICE": "cuda",
        "THAWLINE_WORK": "s3://bucket/work",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage: {}", "stage: Extra inputs"),
        ("stages: {train: {}}", "stages.train"),
        ("defaults: {memory: 16 GB}", "defaults.memory"),
        ("defaults: {accelerator: {count: 1}}", "name the stages that need one"),
        ("stages: {windows: {accelerator: {count: 1}}}", "windows computes nothing on a GPU"),
        ("image: registry.example/thawline", "must have a tag other than latest"),
        ("image: 'registry.example:5000/thawline'", "must have a tag other than latest"),
        ("stages: {windows: {image: 'thawline:latest'}}", "must have a tag other than latest"),
        ("env: {AWS_SECRET_ACCESS_KEY: abc}", "looks like a secret; name it under `secrets`"),
        ("env: {DATABASE: 'postgres://me:word@host/base'}", "DATABASE looks like a secret"),
        ("env: {MLFLOW_TRACKING_URI: 'http://mlflow'}", "name it under `config_maps`"),
        ("work: {folder: /work}", "at which a claim is mounted"),
        ("work: {folder: 's3://bucket', claim: mine}", "at which a claim is mounted"),
        ("work: {folder: work, claim: mine}", "must be an absolute path"),
        ("trainjob: {nodes: 2}", "trainjob needs `work`"),
        ("extends: cpu\ntrainjob: {nodes: 1}", "trainjob.nodes"),
        ("extends: gpu\ntrainjob: {nodes: 2}", "this task only waits for the trainjob"),
        ("extends: mine.yaml", "extends itself"),
        ("extends: nowhere.yaml", "there is no profile"),
        ("[1]", "holds no keys"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_profile_that_cannot_work_is_refused_by_the_name_of_the_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_profile(write(tmp_path, text))


def test_an_unknown_profile_names_those_that_there_are():
    with pytest.raises(ConfigError, match="local, cpu, gpu, gpu-multinode"):
        load_profile("gpus")


@pytest.mark.parametrize("image", ["thawline:0.1.0", "r.example:5000/t:1", "t@sha256:" + "0" * 64])
def test_a_tag_or_a_digest_pins_an_image(image):
    assert Profile(name="mine", image=image).stage("windows").image == image


def test_one_image_for_every_stage_replaces_those_of_a_profile(tmp_path):
    text = "extends: gpu\nstages: {windows: {image: 'other:1'}}"
    profile = load_profile(write(tmp_path, text)).with_image("registry.example/thawline:9")
    made = Compiled.parse(compile_text(profile))
    images = {each.image for each in containers(made).values()}
    assert images == {"registry.example/thawline:9"}
    with pytest.raises(ConfigError, match="latest"):
        profile.with_image("thawline:latest")


def test_a_trainjob_without_gpus_runs_in_the_cpu_image(tmp_path):
    profile = load_profile(write(tmp_path, "extends: cpu\ntrainjob: {nodes: 3, cpu: '8'}"))
    settings = TrainJobSettings.model_validate_json(trainjob_text(profile))
    assert (settings.image, settings.processes) == ("thawline:0.1.0-cpu", 1)
    assert json.loads(trainjob_text(profile))["nodes"] == 3


def test_compile_takes_a_profile(tmp_path, monkeypatch, capsys):
    mine = write(tmp_path, "extends: cpu")
    monkeypatch.chdir(tmp_path)
    compile_pipelines(mine)
    for name in ("retrain", "study"):
        assert "activeDeadlineSeconds" in (tmp_path / f"{name}.mine.yaml").read_text("utf-8")
    compile_pipelines("gpu", check=True)
    assert "2 files are up to date" in capsys.readouterr().out


# What a task makes of it.


def test_a_task_uses_the_device_and_the_folder_that_its_profile_gave_it():
    text = "simulate: {}"
    told = {"THAWLINE_DEVICE": "cuda", "THAWLINE_WORK": "s3://bucket/work/"}
    config = read_config(text, told)
    assert config.runtime.device == "cuda"
    assert config.finetune.checkpoint.folder == "s3://bucket/work/checkpoints"
    own = read_config(text + "\nfinetune: {checkpoint: {folder: /mine}}", told)
    assert own.finetune.checkpoint.folder == "/mine"
    assert read_config(text, {}) == read_config("simulate: {}", {"PATH": "/bin"})


@pytest.mark.parametrize("stage", ["pretrain", "finetune", "evaluate"])
def test_a_stage_that_was_given_a_gpu_fails_where_none_is_visible(stage, tmp_path, monkeypatch):
    import components

    monkeypatch.setenv("THAWLINE_DEVICE", "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("thawline.tracking.pipeline.find_parent", lambda config: "")
    component = getattr(components, stage)
    spec = component.component_spec
    folder = type("Folder", (), {"path": str(tmp_path / "none"), "metadata": {}})()
    arguments = {
        name: "simulate: {}" if name == "config" else "" if each.type == "String" else folder
        for name, each in spec.inputs.items()
    }
    arguments |= {name: folder for name, each in spec.outputs.items() if "@" in each.type}
    with pytest.raises(ConfigError) as caught:
        component.python_func(**arguments)
    assert "runtime.device is cuda, but torch sees no GPU" in caught.value.what
