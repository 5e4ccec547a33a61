"""A server on this machine that answers like the Hugging Face hub, for the parts that downloads of models use."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
API, TREE = (
    re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?"),
    re.compile(r"/api/models/([^/]+/[^/]+)/tree/(.+)"),
)
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """The repositories of a server.

    Attributes:
        repositories: Repository -> revision -> file -> content.
        gated: Repositories whose files need `token`; anybody may list them.
        token: Token with access to gated repositories.
        downloads: (file, commit) of each request for the content of a file.
        endpoint: URL of the server.
    """

    def __init__(self):
        self.repositories, self.gated, self.token = {}, set(), "hf_secret"
        self.downloads, self.endpoint = [], ""

    def add(self, name, directory, revision="main", **more):
        """Add a revision of a repository from a directory, with more files."""
        files = {f.relative_to(directory).as_posix(): f.read_bytes() for f in directory.rglob("*") if f.is_file()}
        self.repositories.setdefault(name, {})[revision] = files | {
            k: v.encode() for k, v in more.pop("files", {}).items()
        }

    def find(self, name, revision):
        """Return the (commit, files) of a revision, or the code of an error."""
        if name not in self.repositories:
            return "RepoNotFound"
        for label, files in self.repositories[name].items():
            if revision in (label, COMMITS[label]):
                return COMMITS[label], files
        return "RevisionNotFound"


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status, code):
        self.answer(status, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        if match := TREE.fullmatch(path) or API.fullmatch(path):
            place = self.hub.find(match[1], match[2] or "main")
            if isinstance(place, str):
                return self.refuse(404 if place == "RevisionNotFound" else 401, place)
            commit, files = place
            if match.re is TREE:
                entries = [{"type": "file", "path": n, "size": len(c), "oid": etag(c)} for n, c in files.items()]
                return self.answer(200, json.dumps(entries).encode())
            data = {"id": match[1], "sha": commit, "siblings": [{"rfilename": n} for n in files]}
            return self.answer(200, json.dumps(data).encode())
        if (match := FILE.fullmatch(path)) is None:
            return self.refuse(404, "EntryNotFound")
        name, revision, file = match.groups()
        place = self.hub.find(name, revision)
        if isinstance(place, str):
            return self.refuse(404, place)
        if name in self.hub.gated and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self.refuse(403 if self.headers["Authorization"] else 401, "GatedRepo")
        commit, files = place
        if file not in files:
            return self.refuse(404, "EntryNotFound")
        if self.command == "GET":
            self.hub.downloads.append((file, commit))
        return self.answer(200, files[file], X_Repo_Commit=commit, ETag=f'"{etag(files[file])}"')

    do_HEAD = do_GET


def etag(content):
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub():
    """Yield a running `Hub` without repositories."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
