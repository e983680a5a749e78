"""What kfp's local runner cannot do or does differently: a list, so that an upgrade shows."""

from typing import NamedTuple, Optional

from kfp import compiler, dsl, kubernetes

from pipelines.local import execute

THIN = {"base_image": "thawline:test", "packages_to_install": [], "install_kfp_package": False}


@dsl.component(**THIN)
def answers() -> NamedTuple("Answers", [("first", bool), ("text", str)]):
    return (True, "it's")


@dsl.component(**THIN)
def act():
    import os

    print("acted in", os.environ.get("FROM_MAP", "nothing"))


@dsl.component(**THIN)
def optional(count: Optional[int] = None):  # noqa: UP045 - kfp knows no other spelling
    print("acted with", count)


@dsl.component(**THIN)
def undefined(metrics: dsl.Output[dsl.Metrics]):
    metrics.log_metric("auc", float("nan"))


@dsl.component(**THIN)
def write_nothing(out: dsl.Output[dsl.Dataset]):
    out.metadata["rows"] = 3


@dsl.component(**THIN)
def read(made: dsl.Input[dsl.Dataset]):
    import os

    print("rows", repr(made.metadata["rows"]), os.path.exists(made.path))


@dsl.component(**THIN)
def items() -> list:
    return ["a", "b"]


@dsl.component(**THIN)
def word() -> str:
    return "word"


@dsl.component(**THIN)
def tell(item: str, text: str):
    print(f"{item} of {text}")


@dsl.container_component
def container():
    return dsl.ContainerSpec(image="thawline:test", command=["true"])


@dsl.pipeline
def named_condition():
    with dsl.If(answers().outputs["first"] == True):  # noqa: E712
        act()


@dsl.pipeline
def settings():
    task = act().set_memory_limit("1G")
    kubernetes.use_config_map_as_env(task, "endpoints", {"key": "FROM_MAP"})
    kubernetes.set_timeout(task, 1)


@dsl.pipeline
def optional_input(count: Optional[int] = None):  # noqa: UP045
    optional(count=count)


@dsl.pipeline
def quoted():
    task = answers()
    with dsl.If(task.outputs["text"] == "it's"):
        act()
    with dsl.Else():
        act()


@dsl.pipeline
def loop():
    before = word()
    with dsl.ParallelFor(items().output, parallelism=1) as item:
        tell(item=item, text=before.output)


@dsl.pipeline
def missing_artifact():
    read(made=write_nothing().outputs["out"])


def test_the_list_of_what_the_local_runner_cannot_do_is_as_known(tmp_path, capsys):
    def attempt(pipeline, **arguments):
        """What it printed, and its error; other tests' loggers may keep it from standard output."""
        log = tmp_path / pipeline.name / "pipeline.log"
        failed = ""
        package = tmp_path / f"{pipeline.name}.yaml"
        try:
            compiler.Compiler().compile(pipeline, str(package))
            execute(package, tmp_path / pipeline.name, arguments)
        except Exception as error:
            failed = repr(error)
        written = log.read_text("utf-8") if log.exists() else ""
        return f"{failed} {written} {capsys.readouterr().out}"

    found = {
        "containers without Python are refused": "only supports running Lightweight Python"
        in attempt(container),
        "a condition on a named output is skipped": "acted" not in attempt(named_condition),
        "a condition on a text with a quote skips both branches": "acted" not in attempt(quoted),
        "an optional input of a pipeline is refused": "acted" not in attempt(optional_input),
        "an optional input of a component left unset is refused": "acted" not in attempt(optional),
        "NaN in a metric fails the task": "Fail to serialize NaN" in attempt(undefined),
        "config maps, limits and timeouts are passed over": "acted in nothing" in attempt(settings),
        "a loop gets its item for an output of a task before it": "a of a" in attempt(loop),
        "an artifact that was never written, with a float for an int": "rows 3.0 False"
        in attempt(missing_artifact),
    }
    assert [gap for gap, known in found.items() if not known] == []
