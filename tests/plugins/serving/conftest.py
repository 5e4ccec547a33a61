"""Settings of the HTTP clients that test servers on this machine."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def _no_certificates(tmp_path_factory):
    """Let clients look up certificates in an empty folder. Each client would take 20 ms to load the default file."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SSL_CERT_FILE", raising=False)
        patched.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield
