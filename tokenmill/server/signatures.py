"""Signatures of thinking blocks: proof that a thought which a client sends back was this server's own.

A client returns the thinking blocks of earlier turns with the conversation. What a model thought shapes what it does
next, so a block that anyone could write would be a way to put words into its head. Each block leaves with an HMAC of
its text under a key of this server, and counts on its return only if that still fits; any other block is dropped.

    shown:   base64( 4 ‖ HMAC-SHA256(k1, text) )
    sealed:  base64( 5 ‖ nonce ‖ mac ‖ text ⊕ stream ),  nonce = 16 random bytes,  mac = HMAC-SHA256(k2, nonce ‖ text),
             stream = the first bytes of SHAKE-256(k3 ‖ mac)
    keys:    k1, k2, k3 = HMAC-SHA256(key of the server, the purpose's name ‖ 0 ‖ id of the client's API key)

The text itself travels in the signature where the client asked not to see it (`display: omitted`) or to carry it for a
server that keeps nothing (`reasoning.encrypted_content`), since it would be lost for the next turn otherwise. It is
encrypted then. Nothing is kept for it on the server, so it works across restarts and with `--no-state`.

Python's standard library has no AEAD cipher, and no dependency of ours brings one, so the two parts are put together
from its hash functions in the way of SIV (RFC 5297; Rogaway and Shrimpton, 2006): a MAC of what is to be encrypted is
at once the tag that proves it and the nonce of its keystream. SIV asks for a pseudorandom function and a stream cipher
with a key each:

- HMAC-SHA256 is the function, with its whole output. No key has two uses, and no client's keys are another's: what one
  stole from another is unknown under its own API key, so the model can't be asked to tell it.
- SHAKE-256 of a key of 32 bytes and a nonce of 32 bytes is the cipher: both have a fixed length, and a sponge that
  begins with its key has no extension attack, so the output is a keystream that, without the
  key, can't be distinguished from random bytes.
- Two texts have the same keystream only where HMAC-SHA256 collides, whatever the random bytes are: a machine that
  draws the same ones twice gives away that two texts are equal, and nothing else. With fresh ones it does not, so that
  a thought can't be guessed by having the model think the guess.
- The text is not packed: how well it packs would tell what a part that the client wrote has in common with the rest.
- What was decrypted is used only after its MAC was compared, in constant time.

What a sealed thought tells without the key: how long its text is. What is not proved is the place: a client can return
its own thoughts in another conversation, or leave them out.

The keys are a file of 32 random bytes each, so that conversations go on after a restart; several servers with one
TOKENMILL_HOME take each other's blocks. The first one signs, the others are still known: a new one written before the
old ones changes the key without losing thoughts. Anyone who has the file can read and write thoughts.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import InvalidConfig
from tokenmill.observe.log import get_log
from tokenmill.store.layout import store_root

log = get_log("server")
KEY_BYTES = 32
MAX_KEYS = 16
NONCE_BYTES = 16
MAC_BYTES = 32
SHOWN = b"\x04"  # the text is in the block
SEALED = b"\x05"  # the text is in the signature, encrypted
FILE_NAME = "signing.key"


class ThoughtKeys:
    """The keys that thoughts are signed with. They are read, or made, when one is first needed."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._reading = threading.Lock()  # long bodies are parsed in threads
        self._known: tuple[bytes, ...] = ()

    def signer(self, owner: str) -> ThoughtSigner:
        """The signer of those who use one API key, by its id."""
        return ThoughtSigner(self, owner)

    def all(self) -> Sequence[bytes]:
        """The key that signs, and those that did before."""
        with self._reading:
            if not self._known:
                self._known = self._load()
            return self._known

    def _load(self) -> tuple[bytes, ...]:
        try:
            return load_keys(self._path or store_root() / FILE_NAME)
        except (OSError, InvalidConfig) as problem:
            log.warning("thinking blocks will not be known again after a restart: %s", problem)
            return (secrets.token_bytes(KEY_BYTES),)


@dataclass(frozen=True)
class ThoughtSigner:
    """Signs thoughts for the clients of one API key and recognises its own."""

    keys: ThoughtKeys
    owner: str

    def sign(self, text: str, *, is_shown: bool = True) -> str:
        """The signature of a thought; with `is_shown` off it carries the text, encrypted."""
        own = OwnKeys.of(self.keys.all()[0], self.owner)
        raw = SHOWN + own.shown_mac(text.encode()) if is_shown else SEALED + own.sealed(text.encode())
        return base64.b64encode(raw).decode()

    def verified(self, text: str, signature: str) -> str | None:
        """The thought that this server signed; None for a block that is not its own or was changed."""
        try:
            raw = base64.b64decode(signature, validate=True)
        except (binascii.Error, ValueError):
            return None
        kind, rest = raw[:1], raw[1:]
        candidates = [OwnKeys.of(key, self.owner) for key in self.keys.all()]
        if kind == SHOWN and any(hmac.compare_digest(rest, own.shown_mac(text.encode())) for own in candidates):
            return text
        if kind == SEALED and not text:
            opened = (own.opened(rest) for own in candidates)
            return next((found.decode() for found in opened if found is not None), None)
        return None


@dataclass(frozen=True)
class OwnKeys:
    """The keys derived from one of the server's keys for one owner, one for each use."""

    shown: bytes
    seal: bytes
    stream: bytes

    @classmethod
    def of(cls, key: bytes, owner: str) -> OwnKeys:
        shown, seal, stream = (
            hmac.digest(key, f"tokenmill thoughts: {use}\0{owner}".encode(), "sha256")
            for use in ("shown", "sealed", "keystream")
        )
        return cls(shown, seal, stream)

    def shown_mac(self, text: bytes) -> bytes:
        return hmac.digest(self.shown, text, "sha256")

    def sealed(self, text: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        mac = hmac.digest(self.seal, nonce + text, "sha256")
        return nonce + mac + self._encrypted(text, mac)

    def opened(self, raw: bytes) -> bytes | None:
        """Return the text that was sealed with these keys; None if it was not."""
        nonce, mac, data = raw[:NONCE_BYTES], raw[NONCE_BYTES:][:MAC_BYTES], raw[NONCE_BYTES + MAC_BYTES :]
        text = self._encrypted(data, mac)
        return text if hmac.compare_digest(mac, hmac.digest(self.seal, nonce + text, "sha256")) else None

    def _encrypted(self, data: bytes, mac: bytes) -> bytes:
        """Data xor a keystream that only this MAC has; the same again decrypts it."""
        stream = hashlib.shake_256(self.stream + mac).digest(len(data))
        return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))


def load_keys(path: Path) -> tuple[bytes, ...]:
    """Read the keys in a file that only its owner can read, the newest first; a key is made if there is no file. Two
    servers that start at the same moment get the same one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _create(path)
    content = path.read_bytes()
    if not content or len(content) % KEY_BYTES or len(content) > MAX_KEYS * KEY_BYTES:
        hint = "delete it to have a new one made"
        raise InvalidConfig(f"{path} does not hold keys of {KEY_BYTES} bytes (at most {MAX_KEYS})", hint=hint)
    if path.stat().st_mode & 0o077:
        log.warning("%s can be read by others, who could forge thoughts with it: chmod 600", path)
    return tuple(content[start : start + KEY_BYTES] for start in range(0, len(content), KEY_BYTES))


def _create(path: Path) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".signing-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())  # a key that is lost with the power was used already
        os.link(name, path)  # whole or not at all, and never over another one's
    except FileExistsError:
        return
    finally:
        os.unlink(name)
