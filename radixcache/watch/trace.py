"""TraceWriter: records which prefixes were asked for, without saying what is in them. This file never imports MLX.

A trace is JSONL: a header, then a line per request.

    {"format": "radixcache-trace", "version": 1, "block_tokens": 64, "salt_id": "...", "plain": false, "clock": "ms"}
    {"request": 0, "time": 1, "tokens": 130, "output": 20, "blocks": "<base64 of 3 digests>"}
    {"request": 1, "time": 2, "tokens": 200, "output": 9, "after": [0, 2], "blocks": "<base64 of 2 digests>"}

    request     number of the line within its header, from 0
    time        in the header's clock: "requests" counts them, "ms" are milliseconds, "synthetic_ms" are made-up ones
    tokens      of the prompt; it has ceil(tokens / block_tokens) blocks, the last one may be partly filled
    output      tokens of the reply
    after       [request, count]: the prompt's first `count` blocks are those of that earlier request; left out for none
    blocks      the digests of the blocks that follow, 8 bytes each, in base64
    ids         instead of blocks in a plain trace: the token ids that follow
    namespace   digest of the namespace (the namespace itself in a plain trace); left out for ""
    session, turn, kind, priority     as the caller gave them; left out for "", None, "", 0

A block's digest is a salted BLAKE2b of the digest before it and the block's keys, the first one of the namespace. So
equal digests mean equal whole prefixes, and whoever has no salt cannot try texts against them.

  W1  A line is written whole and at once, and never changed: what is killed leaves at most its last line torn.
  W2  After a failed write the next line begins a new part with a header of its own. So a torn line is the last one of
      the file or stands before a header, and nothing refers to it.
  W3  Without `plain` no token id, text or name of a namespace gets into the file, and the salt never does.

O(blocks of the prompt) per request. What was written is remembered up to a bound, then forgotten and written anew.
Not thread-safe: PrefixCache holds the only lock.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

FORMAT = "radixcache-trace"
VERSION = 1
DIGEST_BYTES = 8
#: Blocks whose digests are remembered; about 100 bytes each.
KNOWN_BLOCKS = 1 << 18

Clock = Literal["requests", "ms", "synthetic_ms"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)


class TraceWriter:
    """Appends requests to a trace file. A file that has lines already is continued by a new part."""

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
            block_tokens: tokens per digest; reuse is seen in steps of so many.
            salt: up to 64 bytes. Parts of a file that have the same salt share blocks. None: drawn from the system and
                known to nobody afterwards. Only digests depend on it.
            plain: write token ids instead of digests.
            clock: what `time` counts.
            known_blocks: how many blocks to remember.

        Raises:
            ValueError: an argument is out of range, or another writer has the file open.
            OSError: the file cannot be written.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; wanted at least 1.")
        if salt is not None and len(salt) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"salt has {len(salt)} bytes; wanted at most {hashlib.blake2b.MAX_KEY_SIZE}.")
        if clock not in CLOCKS:
            raise ValueError(f"clock is {clock!r}; wanted one of {', '.join(CLOCKS)}.")
        self.path = Path(path)
        self.block_tokens = block_tokens
        self._salt = b"" if plain else os.urandom(16) if salt is None else salt
        self._plain = plain
        self._clock = clock
        self._known_blocks = known_blocks
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
        keys: NDArray[np.int64] | Sequence[int],
        *,
        time: int,
        output_tokens: int = 0,
        namespace: str = "",
        session: str = "",
        turn: int | None = None,
        kind: str = "",
        priority: int = 0,
    ) -> None:
        """Write a request. `keys` are the prompt's, one per token.

        Raises:
            ValueError: there is no key, `time` or `output_tokens` is negative, or the writer is closed.
            OSError: the line could not be written; the next one can be.
        """
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        digests = block_digests(keys, self.block_tokens, salt=self._salt, namespace=namespace)
        about: dict[str, Any] = {"session": session, "turn": turn, "kind": kind, "priority": priority or None}
        if namespace:
            about["namespace"] = namespace if self._plain else _root(self._salt, namespace).hex()
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
        """Write a request whose blocks were hashed elsewhere: 8 bytes each, equal only for equal prefixes.

        Raises:
            ValueError: the digests do not fit the prompt's length, this is a plain trace, or as for `append`.
            OSError: as for `append`.
        """
        wanted = -(-tokens // self.block_tokens)
        if self._plain or len(digests) != wanted or any(len(digest) != DIGEST_BYTES for digest in digests):
            raise ValueError(
                f"{len(digests)} digests for {tokens} tokens{' in a plain trace' if self._plain else ''}; wanted"
                f" {wanted} of {DIGEST_BYTES} bytes each, in a trace that is not plain."
            )
        about: dict[str, Any] = {"session": session, "turn": turn, "kind": kind, "priority": priority or None}
        self._append(list(digests), tokens, time, output_tokens, about, None)

    def close(self) -> None:
        """Close the file; doing it twice does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(
        self,
        digests: list[bytes],
        tokens: int,
        time: int,
        output_tokens: int,
        about: dict[str, Any],
        keys: NDArray[np.int64] | None,
    ) -> None:
        if tokens < 1 or time < 0 or output_tokens < 0:
            raise ValueError(
                f"a prompt of {tokens} tokens at time {time} with {output_tokens} output tokens; wanted 1 or more, and"
                " 0 or more."
            )
        if self._is_torn or len(self._known) > self._known_blocks:
            self._known.clear()
        number = 0 if self._is_torn else self._next_request
        shared = next((index for index, digest in enumerate(digests) if digest not in self._known), len(digests))
        line: dict[str, Any] = {"request": number, "time": time, "tokens": tokens, "output": output_tokens}
        if shared:
            line["after"] = [self._known[digests[shared - 1]], shared]
        if keys is None:
            line["blocks"] = base64.b64encode(b"".join(digests[shared:])).decode()
        else:
            line["ids"] = keys[shared * self.block_tokens :].tolist()
        line.update({name: value for name, value in about.items() if value not in ("", None)})
        # Taken before it is written: a number that nobody used is harmless, one that was used twice is not.
        self._next_request = number + 1
        self._write([line])
        self._known.update(dict.fromkeys(digests[shared:], number))

    def _open(self) -> int:
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ValueError(f"{self.path}: another writer has this trace open; name another file.") from None
        except OSError:
            pass  # a file system without locks
        return handle

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Write lines at once, behind a header where a new part begins."""
        if self._handle is None:
            raise ValueError(f"{self.path}: the trace is closed; open a new TraceWriter to continue it.")
        content = b""
        if self._is_torn:
            content = self._line_end() + _encoded(self._header())
        content += b"".join(map(_encoded, lines))
        self._is_torn = True
        while content:
            content = content[os.write(self._handle, content) :]
        self._is_torn = False

    def _line_end(self) -> bytes:
        """What ends the line that the file ends in, if there is one."""
        assert self._handle is not None
        length_bytes = os.fstat(self._handle).st_size
        return b"" if length_bytes == 0 or os.pread(self._handle, 1, length_bytes - 1) == b"\n" else b"\n"

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "block_tokens": self.block_tokens,
            "salt_id": hashlib.blake2b(self._salt, digest_size=8, person=b"rc salt id").hexdigest(),
            "plain": self._plain,
            "clock": self._clock,
        }


def block_digests(
    keys: NDArray[np.int64], block_tokens: int, *, salt: bytes = b"", namespace: str = "", before: bytes | None = None
) -> list[bytes]:
    """Digests of the blocks of a prompt, the last of which may be partly filled.

    Args:
        before: digest of the block before the first one; None for the beginning of the prompt.
    """
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


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
