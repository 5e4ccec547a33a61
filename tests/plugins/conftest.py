"""Object stores on loopback: moto's S3 server and an emulator of Google Cloud Storage, each in a thread of this process."""

import contextlib
import http.client
import logging
import threading
import types
import uuid

import pytest

from axlearn_testing.chaos import HttpFaults


@pytest.fixture(scope="session")
def moto_server():
    from moto.moto_server import werkzeug_app
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    assert ThreadedMotoServer  # the server below is this one, with faults in between
    app = HttpFaults(werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server, app
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def s3(moto_server, monkeypatch, tmp_path):
    """(URI of an empty bucket, the faults), with the environment of a client."""
    server, app = moto_server
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "aws-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "aws-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    boto3.Session().client("s3").create_bucket(Bucket=name)
    yield f"s3://{name}", app
    app.failing = app.hanging = 0.0
    app.observe = None


def add_preconditions(emulator):
    """The emulator ignores `ifGenerationMatch=0`, which Google's store answers with 412 where the object exists."""
    calls, creating = threading.local(), threading.Lock()
    do_post, create_file = emulator.RequestHandler.do_POST, emulator.Storage.create_file

    def post(self):
        calls.new = "ifGenerationMatch=0" in self.path
        try:
            do_post(self)
        except FileExistsError:
            body = b'{"error": {"code": 412, "message": "conditionNotMet"}}'
            self.send_response(412)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def create(self, bucket_name, file_name, *args, **fields):
        with creating:
            if getattr(calls, "new", False) and file_name in self.objects.get(bucket_name, {}):
                raise FileExistsError(file_name)
            return create_file(self, bucket_name, file_name, *args, **fields)

    emulator.RequestHandler.do_POST, emulator.Storage.create_file = post, create


@pytest.fixture(scope="session")
def gcs_server():
    from http.server import ThreadingHTTPServer

    import gcp_storage_emulator.server as emulator

    emulator.server = types.SimpleNamespace(HTTPServer=ThreadingHTTPServer)  # not the module of everyone
    add_preconditions(emulator)
    for name in ("gcp_storage_emulator", "gcp_storage_emulator.server", "gcp_storage_emulator.handlers.objects"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def gs(gcs_server, monkeypatch):
    """The URI of an empty bucket, with the environment of a client."""
    port = gcs_server._api._httpd.server_port
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "testing")
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client = storage.Client(project="testing", credentials=AnonymousCredentials())
    client.create_bucket(name)
    return f"gs://{name}"


class Forward:
    """A WSGI application that passes requests on to another port of this machine."""

    def __init__(self, port):
        self.port = port

    def __call__(self, environ, start_response):
        path = environ.get("RAW_URI") or environ["REQUEST_URI"]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers = {n[5:].replace("_", "-"): v for n, v in environ.items() if n.startswith("HTTP_")}
        headers |= {"CONTENT-TYPE": environ["CONTENT_TYPE"]} if environ.get("CONTENT_TYPE") else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(environ["REQUEST_METHOD"], path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        answer_headers = [
            (n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "transfer-encoding")
        ]
        start_response(f"{answer.status} {answer.reason}", answer_headers)
        return [data]


@pytest.fixture
def faulty_gs(gs, gcs_server, monkeypatch):
    """(URI of an empty bucket, the faults) of the emulator."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = HttpFaults(Forward(gcs_server._api._httpd.server_port))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    yield gs, app
    server.shutdown()
    thread.join()
    server.server_close()
