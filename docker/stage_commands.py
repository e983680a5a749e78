"""What `check.py` runs in a container: every stage on a small simulated feed, a Kubeflow task."""

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

KUBEFLOW_TASK = """
import json, pathlib, subprocess, sys, yaml
from importlib.resources import files
text = (files("pipelines") / "compiled" / "retrain.yaml").read_text()
spec = next(yaml.safe_load_all(text))["deploymentSpec"]["executors"]["exec-windows"]["container"]
dataset = {
    "name": "dataset", "uri": "/out/kfp/dataset", "metadata": {},
    "type": {"schemaTitle": "system.Dataset", "schemaVersion": "0.0.1"},
}
config = pathlib.Path("/out/tiny.yaml").read_text()
inputs = {"config": config, "source_version": "", "code_version": ""}
task = {
    "inputs": {"parameterValues": inputs},
    "outputs": {
        "parameters": {"Output": {"outputFile": "/out/kfp/Output"}},
        "artifacts": {"dataset": {"artifacts": [dataset]}},
        "outputFile": "/out/kfp/executor_output.json",
    },
}
command = [json.dumps(task) if part == "{{$}}" else part for part in spec["command"] + spec["args"]]
done = subprocess.run(command).returncode
sys.exit(done or not pathlib.Path("/out/kfp/dataset/manifest.json").is_file())
"""
"""Runs the compiled `windows` task's own command, with the input that Kubeflow would hand it."""
