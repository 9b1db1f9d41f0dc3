"""Key files: who may ask, and who may look at the cache. Never imports MLX.

    # one line for each: a name, which logs and metrics may show, and a key, which nothing shows
    ann   3f9a...
    bob   77c1...

An admin's key file holds one such line. Names and keys are printable ASCII without spaces.
"""

from __future__ import annotations

import hmac
import logging
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


class KeyFileError(ValueError):
    """A key file cannot be used; the message is one line and shows no key."""


@dataclass(frozen=True)
class Tenant:
    """Whoever sent a request. Nothing is shared between two namespaces."""

    name: str
    namespace: str = ""
    is_admin: bool = False


class Keyring:
    """The keys of a server.

    Args:
        tenants: file of keys that open every route but the admin's; None: these need no key.
        admin: file of the key that opens every route; None: there is no such key.
        is_namespaced: give each of the tenants a namespace of its own. The admin has the one without a name.

    Raises:
        KeyFileError: a file cannot be read, a line is no name and key, or two lines have a name or a key in common.
    """

    def __init__(self, tenants: Path | None, admin: Path | None, *, is_namespaced: bool = False) -> None:
        self.needs_key, self.has_admin, self.is_namespaced = tenants is not None, admin is not None, is_namespaced
        self._holders: dict[bytes, Tenant] = {}
        if tenants is not None:
            for where, name, key in _lines(tenants):
                self._add(where, key, Tenant(name, name if is_namespaced else ""))
        if admin is not None:
            lines = _lines(admin)
            if len(lines) != 1:
                raise KeyFileError(f"{admin}: {len(lines)} keys; wanted one, of the admin.")
            where, name, key = lines[0]
            self._add(where, key, Tenant(name, is_admin=True))

    def holder(self, presented: Iterable[str]) -> Tenant | None:
        """Whose key is among `presented`; None: nobody's. Takes as long for any key of the same length."""
        found = None
        for candidate in presented:
            for key, tenant in self._holders.items():
                if hmac.compare_digest(key, candidate.encode()):
                    found = tenant
        return found

    def _add(self, where: str, key: str, tenant: Tenant) -> None:
        if key.encode() in self._holders:
            raise KeyFileError(f"{where}: the key of {tenant.name} is another's as well. Give each its own.")
        if tenant.name in {other.name for other in self._holders.values()}:
            raise KeyFileError(f"{where}: the name {tenant.name} is another's as well. Give each its own.")
        self._holders[key.encode()] = tenant


def _lines(path: Path) -> list[tuple[str, str, str]]:
    """Where each key of a file stands, its name and itself."""
    try:
        text = path.read_text(encoding="ascii")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain ASCII"
        raise KeyFileError(f"{path} cannot be read: {reason}.") from error
    if mode & stat.S_IROTH:
        logger.warning("%s may be read by every user of this machine; chmod 600 keeps its keys secret.", path)
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not line.replace("\t", " ").isprintable():
            raise KeyFileError(f"{path}:{number}: {len(words)} words; wanted a name and a key.")
        found.append((f"{path}:{number}", words[0], words[1]))
    if not found:
        raise KeyFileError(f"{path}: no key; wanted a name and a key in a line.")
    return found
