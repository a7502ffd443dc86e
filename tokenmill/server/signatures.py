"""Signatures of thinking blocks: proof that a thought which a client sends back was this server's own.

A client returns the thinking blocks of earlier turns with the conversation. What a model thought shapes what it does
next, so a block that anyone could write would be a way to put words into its head. Each block leaves with an HMAC of
its text under a key of this server, and counts on its return only if that still fits; any other block is dropped.

    shown:   base64( 1 ‖ HMAC-SHA256(key, 1 ‖ text) )
    sealed:  base64( 3 ‖ mac ‖ packed ⊕ stream ),   packed = zlib(text),   mac = HMAC-SHA256(key, 3 ‖ packed),
             stream = the first bytes of SHAKE-256(second key ‖ mac),   second key = HMAC-SHA256(key, a fixed sentence)

The text itself travels in the signature where the client asked not to see it (`display: omitted`) or to carry it for a
server that keeps nothing (`reasoning.encrypted_content`), since it would be lost for the next turn otherwise. It is
encrypted then. Nothing is kept for it on the server, so it works across restarts and with `--no-state`.

Python's standard library has no AEAD cipher, and no dependency of ours brings one, so the two parts are put together
from its hash functions in the way of SIV (RFC 5297; Rogaway and Shrimpton, 2006): a MAC of what is to be encrypted is
at once the tag that proves it and the nonce of its keystream. SIV asks for a pseudorandom function and a stream cipher
with a key each:

- HMAC-SHA256 is the function. The first byte of what it is given tells its uses apart (1, 3, the sentence's letter).
- SHAKE-256 of a key of 32 bytes and a nonce of 32 bytes is the cipher: both have a fixed length, and a sponge that
  begins with its key has no extension attack, so the output is a keystream that nobody without the key can tell from
  random bytes.
- There is no nonce that could be used twice: two different texts have the same only where HMAC-SHA256 collides, and the
  same text is sealed alike.
- What was decrypted is used only after its MAC was compared, in constant time; zlib never sees another's bytes.

What a sealed thought tells without the key: how long its packed text is, and whether two are the same. Whoever has the
key file can read and write thoughts; a new key makes all old ones unknown.

The key is a file of 32 random bytes, so that conversations go on after a restart; several servers with one
TOKENMILL_HOME take each other's blocks.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import tempfile
import threading
import zlib
from pathlib import Path

from tokenmill.errors import InvalidConfig
from tokenmill.observe.log import get_log
from tokenmill.store.layout import store_root

log = get_log("server")
KEY_BYTES = 32
MAC_BYTES = 32
SHOWN = b"\x01"  # the text is in the block
SEALED = b"\x03"  # the text is in the signature, encrypted
SECOND_KEY = b"tokenmill: the key that seals thoughts"  # no payload begins like this
FILE_NAME = "signing.key"


class ThoughtSigner:
    """Signs thoughts and recognises its own. The key is read, or made, when it is first needed."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._reading = threading.Lock()  # long bodies are parsed in threads
        self._known_key: bytes | None = None

    @property
    def _key(self) -> bytes:
        with self._reading:
            if self._known_key is None:
                self._known_key = self._load()
            return self._known_key

    def _load(self) -> bytes:
        try:
            return load_key(self._path or store_root() / FILE_NAME)
        except (OSError, InvalidConfig) as problem:
            log.warning("thinking blocks will not be known again after a restart: %s", problem)
            return secrets.token_bytes(KEY_BYTES)

    def sign(self, text: str, *, is_shown: bool = True) -> str:
        """The signature of a thought; with `is_shown` off it carries the text, encrypted."""
        if is_shown:
            return base64.b64encode(SHOWN + self._mac(SHOWN + text.encode())).decode()
        packed = zlib.compress(text.encode())
        mac = self._mac(SEALED + packed)
        return base64.b64encode(SEALED + mac + self._encrypted(packed, mac)).decode()

    def verified(self, text: str, signature: str) -> str | None:
        """The thought that this server signed; None for a block that is not its own or was changed."""
        try:
            raw = base64.b64decode(signature, validate=True)
        except (binascii.Error, ValueError):
            return None
        tag, mac, data = raw[:1], raw[1 : 1 + MAC_BYTES], raw[1 + MAC_BYTES :]
        if tag not in (SHOWN, SEALED) or bool(text) != (tag == SHOWN) or bool(data) != (tag == SEALED):
            return None
        payload = self._encrypted(data, mac) or text.encode()
        if not hmac.compare_digest(mac, self._mac(tag + payload)):
            return None
        return text or zlib.decompress(payload).decode()  # what was packed here

    def _encrypted(self, data: bytes, nonce: bytes) -> bytes:
        """Data xor a keystream that only this nonce has; the same again decrypts it."""
        key = self._mac(SECOND_KEY)
        stream = hashlib.shake_256(key + nonce).digest(len(data))
        return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")


def load_key(path: Path) -> bytes:
    """The key in a file that only its owner can read; it is made if there is none. Two servers that start at the same
    moment end up with the same one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _create(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise InvalidConfig(f"{path} does not hold a key of {KEY_BYTES} bytes", hint="delete it to have a new one made")
    return key


def _create(path: Path) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".signing-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(name, path)  # whole or not at all, and never over another one's
    except FileExistsError:
        return
    finally:
        os.unlink(name)
