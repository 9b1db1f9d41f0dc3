"""TraceWriter: records which prefixes were asked for, without their content. This file never imports MLX.

A trace is JSONL: a header, then a line for each request.

    {"format": "radixcache-trace", "version": 1, "block_tokens": 64, "salt_id": "...", "plain": false, "clock": "ms"}
    {"request": 0, "time": 1, "tokens": 130, "output": 20, "blocks": "<base64 of 3 digests>"}
    {"request": 1, "time": 2, "tokens": 200, "output": 9, "after": [0, 2], "blocks": "<base64 of 2 digests>"}

    request     number of the line behind its header, from 0
    time        in the clock of the header: a count of requests, milliseconds, or made-up milliseconds ("synthetic_ms")
    tokens      of the prompt: ceil(tokens / block_tokens) blocks, the last may be part of one; output: of the reply
    after       [request, count]: the first `count` blocks are those of that earlier request; left out if there are none
    blocks      digests of the other blocks, 8 bytes each, in base64; a plain trace has `ids`, the token ids
    namespace   digest of the namespace (in a plain trace its name); left out for ""
    session, turn, kind, priority     as the caller gave them; left out for "", None, "", 0

A digest is a salted BLAKE2b of the digest before it, or of the namespace, and the keys of the block. So equal digests
mean equal prefixes. Without the salt, a text cannot be tested against them.

  W1  A line is written whole and never changed: a killed process tears at most the last line.
  W2  After a failed write, the next line starts a new part with its own header. So a torn line ends the file or stands
      before a header, and no line refers to it.
  W3  Without `plain`, no token id, text or name of a namespace gets into the file. The salt never does.

O(blocks of the prompt) for each request. The writer remembers a bounded number of written blocks, then forgets all of
them and writes them again. Not thread-safe: PrefixCache holds the only lock.
"""

from __future__ import annotations

import base64
import fcntl
import gc
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from radixcache.errors import refuse_copy
from radixcache.tokens import Keys

FORMAT, VERSION = "radixcache-trace", 1
#: The first bytes of a trace file.
_START = f'{{"format":"{FORMAT}"'.encode()
DIGEST_BYTES = 8
#: Remembered blocks; each takes about 100 bytes.
KNOWN_BLOCKS = 1 << 18

Clock = Literal["requests", "ms", "synthetic_ms"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Appends requests to a trace file. A file that has lines gets a new part."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_tokens: int = 64,
        salt: bytes | None = None,
        plain: bool = False,
        clock: Clock = "requests",
        known_blocks: int = KNOWN_BLOCKS,
    ) -> None:
        """Open the file and write a header.

        Args:
            block_tokens: tokens of a digest; a trace shows reuse in steps of this size.
            salt: up to 64 bytes for the digests; parts with the same salt share blocks. None: a random, secret salt.
            plain: write token ids instead of digests.
            known_blocks: how many blocks to remember.

        Raises:
            ValueError: an argument is out of range, another writer has the file open, or the file holds no trace.
            OSError: the file cannot be written.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; wanted at least 1.")
        if salt is not None and len(salt) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"salt has {len(salt)} bytes; wanted at most {hashlib.blake2b.MAX_KEY_SIZE}.")
        if clock not in CLOCKS:
            raise ValueError(f"clock is {clock!r}; wanted one of {', '.join(CLOCKS)}.")
        self.path, self.block_tokens = Path(path), block_tokens
        self._salt = b"" if plain else os.urandom(16) if salt is None else salt
        self._plain, self._clock, self._known_blocks = plain, clock, known_blocks
        self._known: dict[bytes, int] = {}
        self._next_request = 0
        self._handle: int | None = self._open()
        self._is_torn = True  # until the first header is written
        try:
            self._write([])
        except OSError:
            self.close()
            raise

    def append(
        self,
        keys: Keys | Sequence[int],
        *,
        time: int,
        output_tokens: int = 0,
        namespace: str = "",
        session: str = "",
        turn: int | None = None,
        kind: str = "",
        priority: int = 0,
    ) -> None:
        """Write a request. `keys` are those of the prompt, one for each token.

        Raises:
            ValueError: there is no key, `time` or `output_tokens` is negative, or the writer is closed.
            OSError: the line was not written; later lines can be.
        """
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        digests = block_digests(keys, self.block_tokens, salt=self._salt, namespace=namespace)
        shown = namespace if self._plain or not namespace else _root(self._salt, namespace).hex()
        about = {"session": session, "turn": turn, "kind": kind, "priority": priority or None, "namespace": shown}
        self._append(digests, len(keys), time, output_tokens, about, keys if self._plain else None)

    def append_blocks(
        self,
        digests: Sequence[bytes],
        *,
        tokens: int,
        time: int,
        output_tokens: int = 0,
        session: str = "",
        turn: int | None = None,
        kind: str = "",
        priority: int = 0,
    ) -> None:
        """Write a request with digests from elsewhere: 8 bytes each, equal only for equal prefixes.

        Raises:
            ValueError: the digests do not fit the length of the prompt, or the trace is plain; else as `append`.
        """
        wanted = -(-tokens // self.block_tokens)
        if self._plain or len(digests) != wanted or any(len(digest) != DIGEST_BYTES for digest in digests):
            raise ValueError(
                f"{len(digests)} digests for {tokens} tokens{' in a plain trace' if self._plain else ''}; wanted"
                f" {wanted} of {DIGEST_BYTES} bytes each, in a trace that is not plain."
            )
        about = {"session": session, "turn": turn, "kind": kind, "priority": priority or None}
        self._append(list(digests), tokens, time, output_tokens, about, None)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    __reduce_ex__ = refuse_copy

    def _append(
        self, digests: list[bytes], tokens: int, time: int, output: int, about: dict[str, Any], keys: Keys | None
    ) -> None:
        if tokens < 1 or time < 0 or output < 0:
            found = f"{tokens} prompt tokens at time {time} with {output} output tokens"
            raise ValueError(f"{found}; wanted at least 1 prompt token, and 0 or more.")
        if self._is_torn or len(self._known) > self._known_blocks:
            self._known.clear()
        number = 0 if self._is_torn else self._next_request
        shared = next((index for index, digest in enumerate(digests) if digest not in self._known), len(digests))
        line: dict[str, Any] = {"request": number, "time": time, "tokens": tokens, "output": output}
        if shared:
            line["after"] = [self._known[digests[shared - 1]], shared]
        if keys is None:
            line["blocks"] = base64.b64encode(b"".join(digests[shared:])).decode()
        else:
            line["ids"] = keys[shared * self.block_tokens :].tolist()
        line.update({name: value for name, value in about.items() if value not in ("", None)})
        # Counted before the write: an unused number is harmless, a number that is used twice is not.
        self._next_request = number + 1
        self._write([line])
        self._known.update(dict.fromkeys(digests[shared:], number))

    def _open(self) -> int:
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self._is_locked(handle):
                gc.collect()  # a cache that is no longer used may hold the lock
                if not self._is_locked(handle):
                    raise ValueError(f"{self.path}: another writer has this trace open; name another file.")
            start = os.pread(handle, len(_START), 0) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
            if not _START.startswith(start):  # a header may be torn
                raise ValueError(f"{self.path}: is not a trace; name another file.")
        except BaseException:
            os.close(handle)
            raise
        return handle

    @staticmethod
    def _is_locked(handle: int) -> bool:
        """Lock a file; False: another writer has locked it."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        return True

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Write lines, behind a header and after the end of a torn line if a new part starts."""
        if self._handle is None:
            raise ValueError(f"{self.path}: the trace is closed; open a new TraceWriter to continue it.")
        parts = [self._header(), *lines] if self._is_torn else lines
        content = b"".join(json.dumps(part, separators=(",", ":")).encode() + b"\n" for part in parts)
        if self._is_torn and (length_bytes := os.fstat(self._handle).st_size):
            is_ended = os.pread(self._handle, 1, length_bytes - 1) == b"\n"
            content = content if is_ended else b"\n" + content
        self._is_torn = True
        while content:
            content = content[os.write(self._handle, content) :]
        self._is_torn = False

    def _header(self) -> dict[str, Any]:
        salt_id = hashlib.blake2b(self._salt, digest_size=8, person=b"rc salt id").hexdigest()
        blocks = {"block_tokens": self.block_tokens, "salt_id": salt_id}
        return {"format": FORMAT, "version": VERSION, **blocks, "plain": self._plain, "clock": self._clock}


def block_digests(
    keys: Keys, block_tokens: int, *, salt: bytes = b"", namespace: str = "", before: bytes | None = None
) -> list[bytes]:
    """Digests of the blocks of a prompt, behind the digest `before`; the last block may be partly filled."""
    content = keys.astype("<i8", copy=False).tobytes()
    step = 8 * block_tokens
    digest = _root(salt, namespace) if before is None else before
    digests = []
    for start in range(0, len(content), step):
        digest = hashlib.blake2b(digest + content[start : start + step], digest_size=DIGEST_BYTES, key=salt).digest()
        digests.append(digest)
    return digests


def _root(salt: bytes, namespace: str) -> bytes:
    text = namespace.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, key=salt, person=b"rc namespace").digest()


#: A file to write, or a writer of the caller.
TraceFile = str | os.PathLike[str] | TraceWriter


def opened_trace(trace: TraceFile | None, clock: Clock = "requests") -> TraceWriter | None:
    """A writer for a file name, or the given writer."""
    if trace is None or isinstance(trace, TraceWriter):
        return trace
    if not isinstance(trace, (str, os.PathLike)):
        raise ValueError(f"trace is {trace!r}; wanted a path, a TraceWriter, or None.")
    return TraceWriter(trace, clock=clock)
