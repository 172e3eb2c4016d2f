"""TLS as a client uses it: certificates verified, TLS 1.2 or newer, one context for all connections of a kind.

Building a context reads the certificate store from disk, so it belongs in a thread; it is shared because making one
costs more than a handshake does.
"""

import ssl
from collections.abc import Sequence
from pathlib import Path

from anabranch.errors import ConfigurationError

__all__ = ["client_tls_context", "system_has_certificates"]


def client_tls_context(ca_bundle: str | None = None, alpn: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
    """Trusts the system's certificates, or only those in `ca_bundle`: a file, or a directory in OpenSSL's form."""
    try:
        if ca_bundle is None:
            context = ssl.create_default_context()
        elif Path(ca_bundle).is_dir():
            context = ssl.create_default_context(capath=ca_bundle)
        else:
            context = ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"the certificates in {ca_bundle} (AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, ca_bundle) cannot be used: {error}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(alpn))
    return context


def system_has_certificates() -> bool:
    """False in images that were built without any, and for Pythons that look for them where there are none."""
    file, directory, *_ = ssl.get_default_verify_paths()
    return bool(file) or (bool(directory) and any(Path(directory).iterdir()))
