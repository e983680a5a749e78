"""Google Cloud Storage's JSON API in memory: as much of it as pyarrow's file system asks for."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "issued-on-loopback"  # noqa: S105
OBJECTS = re.compile(r"^(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?$")


class FakeGcs(ThreadingHTTPServer):
    """A server on loopback that hands out tokens and asks for them."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = {}
        """Bytes by (bucket, name)."""
        self.uploads = {}
        self.drops = 0
        """Downloads still to be cut in their middle."""
        self.refused = frozenset()
        """Names that nobody may write."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def credentials(self):
        """What GOOGLE_APPLICATION_CREDENTIALS names: a file of these."""
        secret = dict.fromkeys(("client_id", "client_secret", "refresh_token"), "x")
        return json.dumps({"type": "authorized_user", "token_uri": f"{self.url}/token"} | secret)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _tell(self, facts, status=200, **headers):
        self._answer(status, json.dumps(facts).encode(), Content_Type="application/json", **headers)

    def _refuse(self, status):
        self._tell({"error": {"code": status, "message": "refused by the test"}}, status)

    def _asked(self):
        """Bucket, name and query of a request; None if it is refused."""
        parts = urlsplit(self.path)
        match = OBJECTS.match(parts.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or match is None:
            self._refuse(401 if match else 404)
            return None
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        return match[1], match[2] and unquote(match[2]), query

    def _facts(self, bucket, name):
        moment = "2026-01-01T00:00:00.000Z"
        return {
            "bucket": bucket,
            "name": name,
            "size": str(len(self.server.objects[bucket, name])),
            "updated": moment,
            "timeCreated": moment,
            "generation": "1",
        }

    def do_GET(self):
        if (asked := self._asked()) is None:
            return
        bucket, name, query = asked
        objects = self.server.objects
        if name is None:
            names = [n for b, n in objects if b == bucket and n.startswith(query.get("prefix", ""))]
            self._tell({"items": [self._facts(bucket, found) for found in sorted(names)]})
        elif (bucket, name) not in objects:
            self._refuse(404)
        elif query.get("alt") != "media":
            self._tell(self._facts(bucket, name))
        else:
            self._send(objects[bucket, name])

    def _send(self, content):
        start, stop = 0, len(content)
        if part := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(part[1]), int(part[2] or stop - 1) + 1
        if self.server.drops > 0:
            self.server.drops -= 1
            self.send_response(200)
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(content[start : (start + stop) // 2])
            self.close_connection = True
            return
        span = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206 if part else 200, content[start:stop], Content_Range=span)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/token":
            self._tell({"access_token": TOKEN, "token_type": "Bearer", "expires_in": 3600})
            return
        if (asked := self._asked()) is None:
            return
        bucket, _, query = asked
        name = query.get("name") or json.loads(body)["name"]
        if name in self.server.refused:
            self._refuse(403)
            return
        key = str(len(self.server.uploads))
        self.server.uploads[key] = (bucket, name, bytearray())
        place = f"{self.server.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable"
        self._answer(200, Location=f"{place}&upload_id={key}")

    def do_PUT(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (asked := self._asked()) is None:
            return
        bucket, name, content = self.server.uploads[asked[2]["upload_id"]]
        content += body
        if self.headers["Content-Range"].endswith("/*"):
            self._answer(308, Range=f"bytes=0-{len(content) - 1}")
        else:
            self.server.objects[bucket, name] = bytes(content)
            self._tell(self._facts(bucket, name))

    def do_DELETE(self):
        if (asked := self._asked()) is None:
            return
        if self.server.objects.pop(asked[:2], None) is None:
            self._refuse(404)
        else:
            self._answer(204)
