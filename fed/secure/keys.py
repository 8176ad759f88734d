"""The keys of a secure sum, all from `cryptography`: X25519, HKDF, AES-256, Ed25519, ECDSA.

A client has, for one run, an Ed25519 key that signs and an X25519 key that letters are encrypted
to; a node key (ECDSA on P-384, as Flower's nodes have) may vouch for both, and an owner who has the
other owners' public node keys takes no others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from symprune.errors import OwnersAffair, SympruneError

KEY_BYTES = 32
SEAL_BYTES = 16
SIGNATURE_BYTES = 64
NODE_BYTES = 49  # a compressed point of P-384
NODE_SIGNATURE_BYTES = 96
CARD_BYTES = 2 * KEY_BYTES + NODE_BYTES + NODE_SIGNATURE_BYTES
ONCE = bytes(12)  # the nonce of a key that encrypts one letter


def need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise SympruneError(
            "Secure sums need the package cryptography: pip install 'symprune[secure]'."
        ) from None


@dataclass(frozen=True)
class Card:
    """What a client shows of itself, and a node key's signature on it; zeros without one."""

    signs: bytes
    reads: bytes
    node: bytes = bytes(NODE_BYTES)
    voucher: bytes = bytes(NODE_SIGNATURE_BYTES)

    def pack(self) -> bytes:
        return self.signs + self.reads + self.node + self.voucher

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        if len(data) != CARD_BYTES:
            raise SympruneError("A client's card is not one.")
        at = (0, KEY_BYTES, 2 * KEY_BYTES, 2 * KEY_BYTES + NODE_BYTES, CARD_BYTES)
        return cls(*(data[start:end] for start, end in pairwise(at)))


def new_secret() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def exchange_key(secret: bytes) -> bytes:
    """The public half of an X25519 secret."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, other: bytes, purpose: str) -> bytes:
    """The key two clients share for one purpose."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        key = X25519PrivateKey.from_private_bytes(secret)
        shared = key.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SympruneError("A client's public key is not one.") from None
    return derive(shared, purpose)


def derive(secret: bytes, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, None, f"symprune {purpose}".encode()).derive(secret)


def seal(key: bytes, letter: bytes) -> bytes:
    """Encrypted and authenticated, with a key that is used for this letter alone."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(ONCE, letter, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """The letter; None if this key did not seal it."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(ONCE, sealed, None)
    except InvalidTag:
        return None


def stream(key: bytes, length: int) -> np.ndarray:
    """So many pseudo-random bytes: AES-256 in counter mode, from a key that is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    made = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(length))
    return np.frombuffer(made, np.uint8)


def verify_key(secret: bytes) -> bytes:
    """The public half of an Ed25519 secret."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign(secret: bytes, text: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).sign(text)


def is_signed(key: bytes, text: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def make_card(signing: bytes, reading: bytes, node_key: Path | None = None) -> Card:
    """A client's card, vouched for by the node key in a file, if there is one."""
    need_cryptography()
    card = Card(verify_key(signing), exchange_key(reading))
    if node_key is None:
        return card
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    try:
        key: Any = serialization.load_ssh_private_key(node_key.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
            raise ValueError("it is not an ECDSA key on P-384")
    except (OSError, ValueError) as error:
        raise OwnersAffair(f"The node key {node_key} cannot be used: {error}.") from error
    numbers = decode_dss_signature(key.sign(_vouched(card), ec.ECDSA(hashes.SHA384())))
    voucher = b"".join(number.to_bytes(NODE_SIGNATURE_BYTES // 2, "big") for number in numbers)
    return Card(card.signs, card.reads, _point(key.public_key()), voucher)


def is_vouched(card: Card) -> bool:
    """Whether the card's node key has signed it."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    half = NODE_SIGNATURE_BYTES // 2
    r, s = (int.from_bytes(part, "big") for part in (card.voucher[:half], card.voucher[half:]))
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), card.node)
        key.verify(encode_dss_signature(r, s), _vouched(card), ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _vouched(card: Card) -> bytes:
    return b"symprune secure sum card " + card.signs + card.reads


def _point(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    point: bytes = key.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    return point


def read_peers(place: Path) -> frozenset[bytes]:
    """The node keys an owner trusts: a file with an OpenSSH public key a line, or a folder of
    `.pub` files."""
    need_cryptography()
    from cryptography.hazmat.primitives import serialization

    try:
        files = sorted(place.glob("*.pub")) if place.is_dir() else [place]
        lines = [line for file in files for line in file.read_bytes().splitlines() if line.strip()]
        found = frozenset(_point(serialization.load_ssh_public_key(line)) for line in lines)
    except (OSError, ValueError, AttributeError) as error:
        raise OwnersAffair(f"{place} does not hold public node keys: {error}.") from error
    if not found or any(len(point) != NODE_BYTES for point in found):
        raise OwnersAffair(f"{place} does not hold public node keys of P-384.")
    return found


def digest(*parts: bytes) -> bytes:
    """Of a list of parts, each with its length."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.digest()


def numbered(numbers: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)
