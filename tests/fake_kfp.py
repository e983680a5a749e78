"""Kubeflow Pipelines' API (v2beta1) and the pods of its runs on loopback, while a test lasts."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import kfp_server_api as api

API = "/apis/v2beta1"
MODELS = {
    "pipelines": api.V2beta1Pipeline,
    "experiments": api.V2beta1Experiment,
    "runs": api.V2beta1Run,
    "recurringruns": api.V2beta1RecurringRun,
}
NODE = "workflows.argoproj.io/node-name"


class FakeKfp:
    """What an installation holds, and every call that was made."""

    def __init__(self, *, multi_user=False):
        self.multi_user = multi_user
        self.pipelines, self.versions, self.experiments = {}, {}, {}
        self.runs, self.recurring, self.pods, self.texts = {}, {}, [], {}
        self.calls, self.headers, self.queries = [], [], []
        self.answer_with = None
        self.state = "PENDING"
        self.page = 2

    def writes(self):
        """The calls that change something, and their bodies."""
        return [call for call in self.calls if call[0] != "GET"]

    def bodies(self, path):
        return [body for _, called, body in self.writes() if called == path]

    def answer(self, method, path, query, body):
        if self.answer_with:
            return self.answer_with
        if path.startswith("/api/v1/namespaces/"):
            return self._kubernetes(path, query)
        path = path.removeprefix(API)
        one = {name: values[0] for name, values in query.items()}
        if path == "/healthz":
            return 200, {"multi_user": self.multi_user}
        if path == "/pipelines/upload_version":
            made = {"pipeline_version_id": f"v{len(self.versions)}", "display_name": one["name"]}
            self.versions.setdefault(one["pipelineid"], []).append(made)
            return 200, made
        inside = method != "GET" or "/runs/" in path or "/versions" in path
        if self.multi_user and not inside and "namespace" not in one:
            return 400, {"message": "namespace is empty in multi-user mode"}
        collection, _, rest = path.strip("/").partition("/")
        if body is not None and (lost := unknown(body, MODELS[collection])):
            return 400, {"message": f"unknown fields {lost}"}
        return getattr(self, f"_{collection}")(method, unquote(rest), one, body)

    def _pipelines(self, method, rest, query, body):
        if method == "POST":
            return 200, self._made(self.pipelines, "pipeline_id", "p", body)
        if rest.startswith("names/"):
            found = [p for p in self.pipelines.values() if p["name"] == rest[len("names/") :]]
            return (200, found[0]) if found else (404, {"code": 5, "message": "not found"})
        return self._listed("pipeline_versions", self.versions.get(rest.split("/")[0], []), query)

    def _experiments(self, method, rest, query, body):
        if method == "POST":
            return 200, self._made(self.experiments, "experiment_id", "e", body)
        return self._listed("experiments", list(self.experiments.values()), query)

    def _runs(self, method, rest, query, body):
        if method == "POST":
            return 200, self._made(self.runs, "run_id", "r", {**body, "state": self.state})
        if rest:
            known = self.runs.get(rest)
            return (200, known) if known else (404, {"code": 5, "message": f"Run {rest} not found"})
        newest = list(self.runs.values())[::-1]
        return 200, {"runs": newest[: int(query["page_size"])]}

    def _recurringruns(self, method, rest, query, body):
        name, _, verb = rest.partition(":")
        if method == "POST" and not verb:
            made = self._made(self.recurring, "recurring_run_id", "s", body)
            made["status"] = f"{made['mode']}D"
            return 200, made
        if method == "POST":
            self.recurring[name]["status"] = f"{verb.upper()}D"
            return 200, {}
        if method == "DELETE":
            del self.recurring[name]
            return 200, {}
        return self._listed("recurringRuns", list(self.recurring.values()), query)

    def _made(self, among, key, letter, body):
        made = {**body, key: f"{letter}{len(among)}-{len(self.calls)}"}
        among[made[key]] = made
        return made

    def _listed(self, key, found, query):
        if query.get("filter"):
            (predicate,) = json.loads(query["filter"])["predicates"]
            wanted = predicate["key"], predicate["string_value"]
            found = [each for each in found if each.get(wanted[0]) == wanted[1]]
        start = int(query.get("page_token") or 0)
        following = start + self.page
        more = {"next_page_token": str(following)} if following < len(found) else {}
        return 200, {key: found[start:following], **more}

    def add_pod(self, run_id, node, *, phase="Succeeded", text=""):
        """A pod of a run; `text` may be a list: what each connection to its log sends."""
        name = f"wf-{len(self.pods)}"
        metadata = {
            "name": name,
            "creationTimestamp": f"2026-01-01T00:00:{len(self.pods):02d}Z",
            "labels": {"pipeline/runid": run_id},
            "annotations": {NODE: f"wf.root.{node}"},
        }
        self.pods.append({"metadata": metadata, "status": {"phase": phase}})
        self.texts[name] = text
        return name

    def _kubernetes(self, path, query):
        log = re.fullmatch(r".*/pods/([^/]+)/log", path)
        if log:
            text = self.texts[log[1]]
            if isinstance(text, list):
                text = text.pop(0)
            return 200, text
        found = self.pods
        for selector, key in (("labelSelector", "labels"), ("fieldSelector", None)):
            for pair in query.get(selector, []):
                name, value = pair.split("=")
                found = [
                    pod
                    for pod in found
                    if (pod["metadata"][key].get(name) if key else pod["metadata"]["name"]) == value
                ]
        return 200, {"kind": "PodList", "items": found}


def unknown(body, model):
    """The keys of a body that Kubeflow's own model does not know, at any depth."""
    known = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
    found = sorted(body.keys() - known)
    for key in body.keys() & known:
        inner = getattr(api, known[key], None)
        if inner is not None and isinstance(body[key], dict):
            found += [f"{key}.{each}" for each in unknown(body[key], inner)]
    return found


@contextmanager
def serving(fake):
    """The address of a server that answers for `fake`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            parts = urlsplit(self.path)
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind = self.headers.get("Content-Type", "")
            body = sent.decode() if "multipart" in kind else json.loads(sent or "null")
            fake.calls.append((self.command, parts.path.removeprefix(API), body))
            fake.headers.append(dict(self.headers))
            fake.queries.append(parse_qs(parts.query))
            status, content = fake.answer(self.command, parts.path, parse_qs(parts.query), body)
            text = content if isinstance(content, str) else json.dumps(content)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            if status == 302:
                self.send_header("Location", "/login")
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
