"""A local Google Cloud Storage: the part of its JSON API that gcsfs and TensorStore use.

Objects live in a dict. There are no directories and there is no rename: a store such as the ones
that runs are kept in. `python fake_gcs.py FILE` writes its address to FILE and serves.
"""

import base64
import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o/?")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o/?")
_COPY = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)")


class Store:
    """The objects by (bucket, name), each with its generation."""

    def __init__(self):
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.sessions: dict[str, tuple[str, str, bytearray]] = {}
        self.lock = threading.Lock()
        self.count = 0

    def put(self, bucket: str, name: str, content: bytes) -> dict:
        with self.lock:
            self.count += 1
            self.objects[bucket, name] = (content, self.count)
        return self.describe(bucket, name)

    def describe(self, bucket: str, name: str) -> dict:
        content, generation = self.objects[bucket, name]
        digest = base64.b64encode(hashlib.md5(content).digest()).decode()
        return {
            "kind": "storage#object", "name": name, "bucket": bucket, "md5Hash": digest,
            "size": str(len(content)), "generation": str(generation), "metageneration": "1",
            "updated": "2026-01-01T00:00:00Z", "timeCreated": "2026-01-01T00:00:00Z",
        }  # fmt: skip

    def list(self, bucket: str, query: dict[str, str]) -> dict:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        low, high = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        names = sorted(n for b, n in list(self.objects) if b == bucket and n.startswith(prefix))
        items, prefixes = [], {}
        for name in names:
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes[prefix + rest.partition(delimiter)[0] + delimiter] = None
            elif low <= name < high:
                items.append(self.describe(bucket, name))
        return {"kind": "storage#objects", "items": items, "prefixes": list(prefixes)}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_):
        pass

    def answer(self, code: int, body: bytes | dict = b"", **headers: str) -> None:
        if isinstance(body, dict):
            body, headers = (
                json.dumps(body).encode(),
                {"Content-Type": "application/json"} | headers,
            )
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def parts(self) -> tuple[str, dict[str, str], bytes]:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        return url.path, query, self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def missing(self) -> None:
        self.answer(404, {"error": {"code": 404, "message": "Not Found"}})

    def stale(self, bucket: str, name: str, query: dict[str, str]) -> bool:
        """Return whether the object has another generation than the request demands."""
        wanted = query.get("ifGenerationMatch")
        now = self.store.objects.get((bucket, name), (b"", 0))[1]
        return wanted is not None and int(wanted) != now

    def do_GET(self):
        path, query, _ = self.parts()
        if match := _OBJECT.fullmatch(path):
            bucket, name = match[1], unquote(match[2])
            if (bucket, name) not in self.store.objects:
                return self.missing()
            if query.get("alt") != "media":
                return self.answer(200, self.store.describe(bucket, name))
            return self.download(*self.store.objects[bucket, name])
        if match := _LIST.fullmatch(path):
            return self.answer(200, self.store.list(match[1], query))
        if re.fullmatch(r"/storage/v1/b/[^/]+", path):
            return self.answer(200, {"kind": "storage#bucket", "name": path.rpartition("/")[2]})
        self.missing()

    def download(self, content: bytes, generation: int) -> None:
        headers = {"x-goog-generation": str(generation), "Content-Type": "application/octet-stream"}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, content, **headers)
        size = len(content)
        first = int(asked[1]) if asked[1] else size - int(asked[2])
        last = int(asked[2]) if asked[1] and asked[2] else size - 1
        if first >= size:
            return self.answer(416)
        last = min(last, size - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.answer(206, content[first : last + 1], **headers)

    def do_POST(self):
        path, query, body = self.parts()
        if path.startswith("/session/"):
            return self.resume(path, body)
        if match := _UPLOAD.fullmatch(path):
            return self.upload(match[1], query, body)
        if match := _COPY.fullmatch(path):
            content, _ = self.store.objects[match[1], unquote(match[2])]
            found = self.store.put(match[3], unquote(match[4]), content)
            return self.answer(200, {"done": True, "resource": found} | found)
        if path == "/batch/storage/v1":
            return self.batch(body)
        self.missing()

    def upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        kind, name = query.get("uploadType"), query.get("name")
        if kind == "multipart":
            boundary = re.search(r"boundary=\"?([^\";]+)", self.headers["Content-Type"])[1].encode()
            meta, content = body.split(b"--" + boundary)[1:3]
            name = json.loads(meta.partition(b"\n\n")[2] or meta.partition(b"\r\n\r\n")[2])["name"]
            separator = b"\r\n\r\n" if b"\r\n\r\n" in content else b"\n\n"
            body = content.partition(separator)[2]
            body = body[:-2] if body.endswith(b"\r\n") else body[:-1]
        if kind == "resumable":
            name = name or json.loads(body)["name"]
            key = str(len(self.store.sessions))
            self.store.sessions[key] = (bucket, name, bytearray())
            return self.answer(200, Location=f"http://{self.headers['Host']}/session/{key}")
        if self.stale(bucket, name, query):
            return self.answer(412, {"error": {"code": 412, "message": "Precondition Failed"}})
        self.answer(200, self.store.put(bucket, name, body))

    def resume(self, path: str, body: bytes) -> None:
        """Add a part of a resumable upload; the last part gives the total length."""
        bucket, name, content = self.store.sessions[path.rpartition("/")[2]]
        content += body
        if self.headers.get("Content-Range", "*/0").endswith("/*"):
            return self.answer(308, Range=f"bytes=0-{len(content) - 1}")
        self.answer(200, self.store.put(bucket, name, bytes(content)))

    def do_DELETE(self):
        path, query, _ = self.parts()
        match = _OBJECT.fullmatch(path)
        key = match[1], unquote(match[2])
        if key not in self.store.objects:
            return self.missing()
        if self.stale(*key, query):
            return self.answer(412, {"error": {"code": 412, "message": "Precondition Failed"}})
        with self.store.lock:
            self.store.objects.pop(key, None)
        self.answer(204)

    def batch(self, body: bytes) -> None:
        """Handle many deletions in one request, as gcsfs sends to remove a tree."""
        paths = re.findall(rb"DELETE (\S+) HTTP", body)
        reply = []
        for index, path in enumerate(paths):
            match = _OBJECT.fullmatch(urlsplit(path.decode()).path)
            found = self.store.objects.pop((match[1], unquote(match[2])), None)
            status = "204 No Content" if found else "404 Not Found"
            reply.append(
                f"--batch\r\nContent-Type: application/http\r\nContent-ID: <response-{index + 1}>"
                f"\r\n\r\nHTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        text = "".join(reply) + "--batch--\r\n"
        self.answer(200, text.encode(), Content_Type="multipart/mixed; boundary=batch")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Ignore clients that do not wait for an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve() -> Server:
    """Return a server on a free local port, not yet running."""
    handler = type("Bound", (Handler,), {"store": Store()})
    return Server(("127.0.0.1", 0), handler)


if __name__ == "__main__":
    server = serve()
    Path(sys.argv[1]).write_text(f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()
