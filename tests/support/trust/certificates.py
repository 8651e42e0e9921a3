"""Certificates made for a test: an authority, and certificates that it, or something else, has signed."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)
SERVER_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, both also as PEM."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Files of the certificate and of its key, which only this user may read."""
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(self.pem)
        key.touch(mode=0o600)
        key.write_bytes(self.key_pem)
        return cert, key


def authority(name: str = "authority", *, issuer: Certificate | None = None, **how: object) -> Certificate:
    return issue(name, issuer, names=(), is_authority=True, **how)  # type: ignore[arg-type]


def issue(
    common_name: str,
    issuer: Certificate | None,
    *,
    names: Sequence[str] = (),
    is_authority: bool = False,
    begins: datetime.timedelta = -_DAY,
    ends: datetime.timedelta = _DAY,
    usage: str | None = None,
    key: ec.EllipticCurvePrivateKey | None = None,
    issuer_name: str | None = None,
    signed_with: ec.EllipticCurvePrivateKey | None = None,
    critical_extension: bool = False,
) -> Certificate:
    """A certificate. issuer: None signs itself. names: DNS names, addresses and URIs. usage: client or server, or all.

    issuer_name and signed_with put something else in the place of the issuer's.
    """
    key = key or ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])
    by = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer_name)]) if issuer_name else None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by or (issuer.certificate.subject if issuer else subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
    if usage is not None:
        oid = {"client": ExtendedKeyUsageOID.CLIENT_AUTH, "server": ExtendedKeyUsageOID.SERVER_AUTH}[usage]
        builder = builder.add_extension(x509.ExtendedKeyUsage([oid]), critical=True)
    if critical_extension:
        unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.55555.1"), b"\5\0")
        builder = builder.add_extension(unknown, critical=True)
    signer = signed_with or (issuer.key if issuer else key)
    return Certificate(builder.sign(signer, hashes.SHA256()), key)


def _name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
