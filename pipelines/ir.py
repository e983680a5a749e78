"""Reads a compiled pipeline by Kubeflow's own protos and finds references that lead nowhere.

kfp 2.17 compiles some pipelines to a file whose references dangle (a resource taken from a pipeline
input inside a condition, for one) and says nothing; the run then fails on the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes_pb2
from kfp.pipeline_spec import pipeline_spec_pb2 as pb

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader; where libyaml is there, its fast one."""
PLACEHOLDER = re.compile(r"\{\{\$\.inputs\.(parameters|artifacts)\['([^']+)'\]")
CONDITION_VALUE = re.compile(r"inputs\.(parameter_values|artifacts)\['([^']+)'\]")


@dataclass(frozen=True)
class Compiled:
    """A compiled pipeline, parsed strictly: an unknown field is an error."""

    spec: Any
    """PipelineSpec."""
    deployment: Any
    """PipelineDeploymentConfig."""
    kubernetes: dict[str, Any]
    """KubernetesExecutorConfig of each executor that has one."""

    @classmethod
    def parse(cls, text: str) -> Compiled:
        """Parses the YAML text of a compiled pipeline.

        Raises:
            google.protobuf.json_format.ParseError: The text is no pipeline of this kfp version.
        """
        first, *platforms = yaml.load_all(text, Loader=LOADER)
        spec = json_format.ParseDict(first, pb.PipelineSpec())
        deployment = json_format.ParseDict(
            json_format.MessageToDict(spec.deployment_spec), pb.PipelineDeploymentConfig()
        )
        kubernetes = {}
        for document in platforms:
            platform = json_format.ParseDict(document, pb.PlatformSpec()).platforms["kubernetes"]
            for name, config in platform.deployment_spec.executors.items():
                kubernetes[name] = json_format.ParseDict(
                    json_format.MessageToDict(config), kubernetes_pb2.KubernetesExecutorConfig()
                )
        return cls(spec, deployment, kubernetes)

    def components(self) -> dict[str, Any]:
        """Every component by name; the pipeline itself is `root`."""
        return {"root": self.spec.root, **self.spec.components}


def dangling(compiled: Compiled) -> list[str]:
    """Every reference that leads nowhere, and everything that nothing leads to; empty is good."""
    components = compiled.components()
    executors = compiled.deployment.executors
    found: list[str] = []
    used_components, used_executors = {"root"}, set()
    for name, component in components.items():
        if component.WhichOneof("implementation") == "dag":
            used_components |= {t.component_ref.name for t in component.dag.tasks.values()}
            found += [f"{name}: {what}" for what in _dag_problems(component, components)]
        else:
            used_executors.add(component.executor_label)
            if component.executor_label not in executors:
                found.append(f"{name}: no executor {component.executor_label}")
    found += [f"{name}: no task uses it" for name in components.keys() - used_components]
    found += [f"{name}: no component uses it" for name in executors.keys() - used_executors]
    found += [f"{name}: no such executor" for name in compiled.kubernetes.keys() - executors.keys()]
    found += list(_placeholder_problems(compiled))
    return sorted(found)


def _dag_problems(component: Any, components: dict[str, Any]) -> Iterator[str]:
    tasks = component.dag.tasks
    for name, task in tasks.items():
        target = components.get(task.component_ref.name)
        if target is None:
            yield f"{name}: no component {task.component_ref.name}"
            continue
        for upstream in task.dependent_tasks:
            if upstream not in tasks:
                yield f"{name}: depends on {upstream}, which is not there"
        for key, value in task.inputs.parameters.items():
            problem = _parameter_problem(value, task, component, components)
            if problem:
                yield f"{name}.{key}: {problem}"
        for key, value in task.inputs.artifacts.items():
            problem = _artifact_problem(value, task, component, components)
            if problem:
                yield f"{name}.{key}: {problem}"
        yield from (f"{name}: {what}" for what in _unmet(task, target))
        for _, key in CONDITION_VALUE.findall(task.trigger_policy.condition):
            if key not in task.inputs.parameters and key not in task.inputs.artifacts:
                yield f"{name}: the condition reads {key}, which is no input of it"
    outputs = component.dag.outputs
    for key, output in outputs.parameters.items():
        for selector in (
            output.value_from_parameter,
            *output.value_from_oneof.parameter_selectors,
        ):
            producer = selector.producer_subtask
            if producer and producer not in tasks:
                yield f"output {key}: no task {producer}"
    for key, output in outputs.artifacts.items():
        for selector in output.artifact_selectors:
            if selector.producer_subtask not in tasks:
                yield f"output {key}: no task {selector.producer_subtask}"


def _parameter_problem(value: Any, task: Any, component: Any, components: dict[str, Any]) -> str:
    kind = value.WhichOneof("kind")
    if kind == "component_input_parameter":
        name = value.component_input_parameter
        known = name in component.input_definitions.parameters
        return "" if known else f"the enclosing pipeline has no input {name}"
    if kind == "task_output_parameter":
        source = value.task_output_parameter
        return _output_problem(
            source.producer_task,
            source.output_parameter_key,
            "parameters",
            task,
            component,
            components,
        )
    if kind == "task_final_status":
        producer = value.task_final_status.producer_task
        known = producer in component.dag.tasks and producer in task.dependent_tasks
        return "" if known else f"no upstream task {producer} to take the status of"
    if kind == "runtime_value":
        for _, name in PLACEHOLDER.findall(value.runtime_value.constant.string_value):
            if name not in task.inputs.parameters:
                return f"the text reads {name}, which is no input of the task"
        return ""
    return "it has no value"


def _artifact_problem(value: Any, task: Any, component: Any, components: dict[str, Any]) -> str:
    if value.WhichOneof("kind") == "component_input_artifact":
        name = value.component_input_artifact
        known = name in component.input_definitions.artifacts
        return "" if known else f"the enclosing pipeline has no input {name}"
    source = value.task_output_artifact
    return _output_problem(
        source.producer_task, source.output_artifact_key, "artifacts", task, component, components
    )


def _output_problem(
    producer: str, key: str, kind: str, task: Any, component: Any, components: dict[str, Any]
) -> str:
    if producer not in component.dag.tasks:
        return f"no task {producer}"
    if producer not in task.dependent_tasks:
        return f"it reads {producer}, but does not wait for it"
    made = components.get(component.dag.tasks[producer].component_ref.name)
    known = made is not None and key in getattr(made.output_definitions, kind)
    return "" if known else f"{producer} has no output {key}"


def _unmet(task: Any, target: Any) -> Iterator[str]:
    for kind in ("parameters", "artifacts"):
        given = set(getattr(task.inputs, kind))
        if kind == "parameters" and task.parameter_iterator.item_input:
            # What a loop is over.
            given.add(task.parameter_iterator.item_input)
        for key, wanted in getattr(target.input_definitions, kind).items():
            has_default = kind == "parameters" and wanted.HasField("default_value")
            if key not in given and not wanted.is_optional and not has_default:
                yield f"input {key} is not given"
    if target.WhichOneof("implementation") == "dag":
        for kind in ("parameters", "artifacts"):
            for key in getattr(task.inputs, kind):
                if key not in getattr(target.input_definitions, kind):
                    yield f"{task.component_ref.name} has no input {key}"


def _placeholder_problems(compiled: Compiled) -> Iterator[str]:
    components = compiled.components()
    for component in components.values():
        for name, task in component.dag.tasks.items():
            target = components.get(task.component_ref.name)
            if target is None or target.executor_label not in compiled.deployment.executors:
                continue
            known = {
                *task.inputs.parameters,
                *task.inputs.artifacts,
                *target.input_definitions.parameters,
                *target.input_definitions.artifacts,
            }
            text = str(
                json_format.MessageToDict(compiled.deployment.executors[target.executor_label])
            ).replace("\\'", "'")
            for _, key in PLACEHOLDER.findall(text):
                if key not in known:
                    yield f"{name}: its container reads {key}, which is no input of it"
