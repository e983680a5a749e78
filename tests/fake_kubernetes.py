"""An API server on loopback that knows TrainJobs, pods and logs, for as long as a test lasts."""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
PODS = "/api/v1/namespaces/team/pods"
RUNNING = {"state": {"running": {}}}


def ended(code):
    return {"state": {"terminated": {"exitCode": code}}}


def condition(kind, reason="", message="", at=None):
    stamp = (at or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": stamp,
    }


class FakeKubernetes:
    """What a namespace called team holds, and every call that was made."""

    def __init__(self):
        self.jobs, self.pods, self.logs = {}, {}, {}
        self.calls, self.queries, self.refusals = [], [], []
        self.on_create = lambda body: None
        self.on_delete = lambda name: None

    def add_pod(self, job, index=0, phase="Running", state=RUNNING, **status):
        name = f"{job}-node-0-{index}-x"
        self.pods[name] = {
            "metadata": {
                "name": name,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {
                    "jobset.sigs.k8s.io/jobset-name": job,
                    "jobset.sigs.k8s.io/replicatedjob-name": "node",
                    "batch.kubernetes.io/job-completion-index": str(index),
                },
            },
            "status": {
                "phase": phase,
                "containerStatuses": [
                    {"name": "node", "image": "", "imageID": "", "ready": True, "restartCount": 0}
                    | state
                ],
                **status,
            },
        }
        return name

    def write(self, pod, *lines):
        log = self.logs.setdefault(pod, [])
        for line in lines:
            log.append(f"2026-01-01T00:00:00.{len(log):09d}Z {line}\n")

    def end(self, job, kind, **facts):
        self.jobs[job].setdefault("status", {})["conditions"] = [condition(kind, **facts)]

    def answer(self, method, path, query, body):
        self.calls.append((method, path.rpartition("/trainjobs")[2] or path))
        self.queries.append(query)
        if self.refusals:
            status, message = self.refusals.pop(0)
            return status, {"message": message}
        name = path.removeprefix(JOBS).strip("/")
        if path == PODS:
            wanted = dict(pair.split("=") for pair in query["labelSelector"][0].split(","))
            found = [
                pod
                for pod in self.pods.values()
                if wanted.items() <= pod["metadata"]["labels"].items()
            ]
            return 200, {"kind": "PodList", "items": found}
        if path.startswith(PODS):
            pod = path.removeprefix(PODS).split("/")[1]
            tail = int(query.get("tailLines", ["0"])[0])
            return 200, "".join(self.logs.get(pod, [])[-tail:])
        if method == "POST":
            return self._create(query, body)
        if method == "GET" and not name:
            return 200, {"items": list(self.jobs.values())}
        if name not in self.jobs:
            return 404, {"message": f"trainjobs {name!r} not found"}
        if method == "DELETE":
            del self.jobs[name]
            self.on_delete(name)
            return 200, {"status": "Success"}
        return 200, self.jobs[name]

    def _create(self, query, body):
        name = body["metadata"]["name"]
        if name in self.jobs:
            return 409, {"message": "already exists"}
        # As the server does with fieldValidation=Strict.
        assert query["fieldValidation"] == ["Strict"]
        if known(body) != body:
            return 400, {"message": "strict decoding error: unknown field"}
        self.jobs[name] = body
        self.on_create(body)
        return 201, body


def known(body):
    """What Kubeflow's own model of a TrainJob keeps of a body."""
    return json.loads(json.dumps(TrainerV1alpha1TrainJob.from_dict(body).to_dict()))


@contextmanager
def serving(fake):
    """The address of a server that answers for `fake`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, content = fake.answer(self.command, parts.path, parse_qs(parts.query), body)
            text = content if isinstance(content, str) else json.dumps(content)
            self.send_response(status)
            kind = "text/plain" if isinstance(content, str) else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
