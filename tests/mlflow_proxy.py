"""A proxy before an MLflow server that can go down at a request, lose a reply or ask who calls."""

import base64
import http.client
import http.server
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}


class Proxy:
    """Passes requests on; `down_at`, `loses` and `forbids` are parts of a path."""

    def __init__(self, server_uri):
        self.server = urlsplit(server_uri)
        self.uri = ""
        self.down_at = None
        self.down = False
        self.loses = None
        self.forbids = None
        self.password = None
        self.seen = []

    def up(self):
        self.down, self.down_at = False, None

    def refuses(self, path):
        if self.down_at is not None and self.down_at in path:
            self.down = True
        return self.down

    def loses_reply(self, path):
        if self.loses is None or self.loses not in path:
            return False
        self.loses = None
        return True

    def knows(self, headers):
        wanted = f"Basic {base64.b64encode(f'me:{self.password}'.encode()).decode()}"
        return self.password is None or headers.get("Authorization") == wanted

    def answer(self, method, path, headers, body):
        connection = http.client.HTTPConnection(self.server.hostname, self.server.port, timeout=60)
        kept = {name: value for name, value in headers.items() if name.lower() != "host"}
        connection.request(method, path, body, kept)
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        named = [(n, v) for n, v in reply.getheaders() if n.lower() not in HOP_BY_HOP]
        return reply.status, named, content


@contextmanager
def proxied(server_uri):
    proxy = Proxy(server_uri)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self):
            body = self.read_body()
            proxy.seen.append(self.path)
            if proxy.refuses(self.path):
                self.close_connection = True
                return
            if proxy.forbids and proxy.forbids in self.path:
                status, headers, content = 403, [], b"Permission denied"
            elif proxy.knows(self.headers):
                status, headers, content = proxy.answer(self.command, self.path, self.headers, body)
            else:
                status, headers, content = 401, [], b"You are not authenticated."
            if proxy.loses_reply(self.path):
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on  # noqa: N815

        def read_body(self):
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            del self.headers["Transfer-Encoding"]
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy.uri = f"http://127.0.0.1:{server.server_port}"
        yield proxy
        server.shutdown()
