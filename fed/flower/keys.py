"""Certificates and keys of a federation: an authority, the server's TLS pair, a key per node.

An authority is followed by another in two steps. First `ca.crt` has both certificates and goes to
everybody, while the server's is still of the old one; then the new one signs the server's, and
`ca.crt` has it alone. Who has the file of the first step accepts the server before and after.

Private keys are readable by their owner only; a node's key proves to the server who it is (P-384,
as Flower asks for). Who has it is that node, so of several owners each makes its own and hands over
the public half. `cryptography` comes with Flower.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from pathlib import Path
from typing import Any

from symprune.errors import SympruneError
from symprune.machine import durable

YEARS = 2
AUTHORITY = "symprune federation"
NEXT = "next-ca.key"  # in the keys' folder between the two steps


def make_keys(folder: Path, hosts: tuple[str, ...], nodes: int) -> None:
    """`ca.crt`, `ca.key`, `superlink.crt`, `superlink.key` for these host names and addresses, and
    `node-i.key`, `node-i.pub`. What is there already stays; a node whose public key is there has
    its private one elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not (folder / "superlink.crt").exists():
        _server(folder, hosts, *_authority(folder / "ca.crt", folder / "ca.key"))
    for host in sorted(set(hosts) - _hosts(folder / "superlink.crt")):
        raise SympruneError(f"{folder / 'superlink.crt'} is not for {host}: use another folder.")
    for number in range(nodes):
        if not (folder / f"node-{number}.pub").exists():
            make_node_key(folder / f"node-{number}.key")


def make_node_key(file: Path) -> Path:
    """A node's private key in this file, and its public half beside it, whose place is returned;
    neither takes the place of anything."""
    public = file.with_suffix(".pub")
    for place in (file, public):
        if place.exists() or place.is_symlink():
            raise SympruneError(f"{place} exists and is left as it is.")
    if public == file:
        raise SympruneError(f"{file} is to hold a private key: call it {file.stem}.key.")
    _node(file)
    return public


def take_node_keys(folder: Path, given: Path, nodes: int) -> list[int]:
    """Take the public keys that owners have made, `node-i.pub` in a folder; the nodes whose key is
    another than before."""
    from symprune.fed.secure.keys import read_peers

    changed = []
    for number in range(nodes):
        name = f"node-{number}.pub"
        if not (given / name).exists():
            continue
        read_peers(given / name)
        content, before = (given / name).read_bytes(), folder / name
        if not before.exists() or before.read_bytes() != content:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / f"node-{number}.key").unlink(missing_ok=True)
            before.write_bytes(content)
            changed.append(number)
    if not any((given / f"node-{number}.pub").exists() for number in range(nodes)):
        raise SympruneError(f"{given} has no public keys of nodes: node-0.pub, node-1.pub, ...")
    return changed


def renew_keys(folder: Path, hosts: tuple[str, ...], nodes: int) -> list[int]:
    """A new key and certificate for the SuperLink, from the same authority, so that nodes need no
    new one to trust it; and new keys for the nodes whose private keys are here, whose public halves
    must be registered: their numbers. The others' are their owners'."""
    from cryptography.hazmat.primitives import serialization

    secret = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    _server(folder, hosts, secret, _first_name(folder / "ca.crt"))
    here = [number for number in range(nodes) if (folder / f"node-{number}.key").exists()]
    for number in here:
        _node(folder / f"node-{number}.key")
    return here


def renew_authority(folder: Path, hosts: tuple[str, ...]) -> bool:
    """The next step to another authority; whether it was the last one."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    known, following = folder / "ca.crt", folder / NEXT
    if not following.exists():
        before = known.read_text()
        _authority(folder / "next-ca.crt", following)
        durable.write_text(known, before + (folder / "next-ca.crt").read_text())
        return False
    secret = serialization.load_pem_private_key(following.read_bytes(), None)
    fresh = (folder / "next-ca.crt").read_bytes()
    name = x509.load_pem_x509_certificate(fresh).subject
    if not known.read_bytes().endswith(fresh):  # a crash came between: nobody has it yet
        durable.write_text(known, (known.read_bytes() + fresh).decode())
        return False
    _server(folder, hosts, secret, name)
    _write_key(folder / "ca.key", secret)
    durable.write_text(known, fresh.decode())
    (folder / "next-ca.crt").unlink()
    following.unlink()
    return True


def _first_name(certificates: Path) -> Any:
    from cryptography import x509

    return x509.load_pem_x509_certificates(certificates.read_bytes())[0].subject


def _hosts(certificate: Path) -> set[str]:
    """The names and addresses that a certificate is for."""
    from cryptography import x509

    parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def _authority(certificate: Path, key: Path) -> tuple[Any, Any]:
    """A new authority's certificate, written last so that its key is there, and its name. No two
    are called alike: who has both must find the right one."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    authority = ec.generate_private_key(ec.SECP384R1())
    issuer = _name(f"{AUTHORITY} {secrets.token_hex(4)}")
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
        )
    )
    _write_key(key, authority)
    _write_certificate(certificate, root, authority)
    return authority, issuer


def _server(folder: Path, hosts: tuple[str, ...], authority: Any, issuer: Any) -> None:
    """The SuperLink's key and certificate; the certificate comes last, so that it fits the key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    server = ec.generate_private_key(ec.SECP384R1())
    names: list[x509.GeneralName] = [_host(host) for host in hosts]
    leaf = (
        _certificate(_name(hosts[0]), issuer, server.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
    )
    _write_key(folder / "superlink.key", server)
    _write_certificate(folder / "superlink.crt", leaf, authority)


def _node(file: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write_secret(file, secret)
    file.with_suffix(".pub").write_bytes(public + b"\n")


def _name(common: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(sign_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(subject: Any, issuer: Any, public: Any) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _write_certificate(file: Path, builder: Any, key: Any) -> None:
    from cryptography.hazmat.primitives import hashes, serialization

    signed = builder.sign(key, hashes.SHA384())
    file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _write_key(file: Path, key: Any) -> None:
    from cryptography.hazmat.primitives import serialization

    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write_secret(file, secret)


def _write_secret(file: Path, content: bytes) -> None:
    """Never readable by others, not even for a moment."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(content)
