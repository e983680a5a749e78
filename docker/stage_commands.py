"""What `check.py` runs in a container: every stage on a small simulated feed, Kubeflow tasks."""

CONFIG = """\
workdir: /out/runs
simulate: {impressions: 20_000, users: 200, items: 400, days: 12}
windows: {test_days: 2, finetune_days: 5, pretrain_days: 5, tiers: {head: 20, torso: 5}}
model: {dim: 8, ffn: 8, layers: 1, mlp: [8]}
pretrain: {epochs: 1}
finetune: {epochs: 2, batch_size: 64}
gate: {min_auc: 0.0}
tracking: {model_name: tiny-ranker}
"""

STAGES = {
    "simulate": ("simulate", "/out/log"),
    **{stage: (stage,) for stage in ("windows", "pretrain", "finetune", "evaluate", "register")},
}

IMPORTS = "import torchrec, fbgemm_gpu, kfp.kubernetes, mlflow.pyfunc, thawline.tables.sharded"
"""What the stages below do not all reach, and a package that lost too much would not survive."""

KUBEFLOW_TASKS = """
import json, os, pathlib, subprocess, sys, yaml
from importlib.resources import files
text = (files("pipelines") / "compiled" / "retrain.yaml").read_text()
executors = next(yaml.safe_load_all(text))["deploymentSpec"]["executors"]
environment = os.environ | {"THAWLINE_RUN_ID": "image-check"}

def run(task, inputs, **outputs):
    written = pathlib.Path("/out/kfp", task, "executor_output.json")
    outputs["outputFile"] = str(written)
    given = {"inputs": {"parameterValues": inputs}, "outputs": outputs}
    spec = executors["exec-" + task]["container"]
    command = spec["command"] + spec["args"]
    command = [json.dumps(given) if part == "{{$}}" else part for part in command]
    if subprocess.run(command, env=environment).returncode:
        sys.exit(task + " failed")
    return json.loads(written.read_text())["parameterValues"]

config = pathlib.Path("/out/tiny.yaml").read_text().replace("/out/runs", "/out/kfp/runs")
started = run("start", {"config": config})
versions = {name: started[name] for name in ("source_version", "code_version")}
dataset = {
    "name": "dataset", "uri": "/out/kfp/dataset", "metadata": {},
    "type": {"schemaTitle": "system.Dataset", "schemaVersion": "0.0.1"},
}
run(
    "windows", {"config": started["windows_config"]} | versions,
    parameters={"Output": {"outputFile": "/out/kfp/Output"}},
    artifacts={"dataset": {"artifacts": [dataset]}},
)
sys.exit(not pathlib.Path("/out/kfp/dataset/manifest.json").is_file())
"""
"""Runs the compiled `start` and `windows` by their own commands, with the input of Kubeflow's."""
