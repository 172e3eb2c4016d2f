"""TLS certificates for the local server: the user's own, or a self-signed one that is created at each start.

A self-signed certificate needs `cryptography` (the extra `tls`). It names the loopback addresses, `localhost` and the
host that the server listens on. Clients trust it through its file (`AWS_CA_BUNDLE`, boto3's `verify=`).
"""

import datetime as dt
import ipaddress
import os
import ssl
from pathlib import Path

from anabranch.errors import ConfigurationError

_LIFETIME = dt.timedelta(days=30)
_MISSING = (
    "a self-signed certificate needs the package `cryptography`: pip install 'anabranch[tls]', "
    "or pass your own certificate and key"
)


def load_certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """A TLS context for a server. `key` is optional if the certificate file contains it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except FileNotFoundError:
        missing = next(path for path in (certificate, key) if path is not None and not path.exists())
        raise ConfigurationError(f"no such file: {missing}") from None
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cannot load certificate {certificate} with key {key or certificate}: {error}"
        ) from None
    return context


def write_self_signed_certificate(folder: Path, host: str, now: dt.datetime) -> tuple[Path, Path]:
    """Writes `certificate.pem` and `key.pem` into `folder` and returns their paths."""
    try:
        from cryptography import x509  # noqa: PLC0415 -- an optional dependency
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415
    except ImportError:
        raise ConfigurationError(_MISSING) from None

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "anabranch local Kinesis")])
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    addresses = ["127.0.0.1", "::1"]
    try:
        addresses.append(str(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    names.extend(x509.IPAddress(ipaddress.ip_address(address)) for address in dict.fromkeys(addresses))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName(list(dict.fromkeys(names))), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "certificate.pem", folder / "key.pem"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with open(os.open(key_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123 -- private from the start
        file.write(pem)
    return certificate_path, key_path
