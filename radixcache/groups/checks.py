"""RowChecks: check the rows of a group that were drawn for verification, and act on a mismatch.

A row has two checks. Each one compares the row with a cold run:

    first pass   [0, resume) | compare every layer | [resume, end of the prompt) -> logits of the prompt's last token
    close        [0, end) | compare every layer | -> logits after one of the last tokens

The first check is left out if the row resumed at 0. The second check covers all forward passes of the row, also batched
ones and drafts, before their state is stored. It compares logits of the row's last pass with several tokens, or else of
its last pass. So a drawn row costs two more prefills: of its prompt, and of its prompt and reply. While a check runs,
its cold state and a copy of the row's keys and values count against the budget. If they do not fit, it is skipped.

After a mismatch, the path is quarantined, and rows that share it no longer store or share it (`Group.distrust`). If the
first check fails, the row starts over at 0, so its answer is right. The second check comes too late for the answer. The
row is then stored up to its first wrong token or, if that is not known, up to where it resumed.

The second check is skipped for rows that were shifted or whose state was lost, and if an error closes the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx

from radixcache.groups.row import Room, Row
from radixcache.tokens import TokenIds
from radixcache.verify import Check, Finding, Part, Verifier


class Noted(NamedTuple):
    """Logits (V,) after the token at offset `at`; `is_wide`: they come from a pass of several tokens."""

    at: int
    logits: mx.array
    is_wide: bool


class RowChecks:
    """The checks of the drawn rows of one group. Takes the lock; forward passes run without it."""

    def __init__(self, room: Room) -> None:
        self._room, self._lock = room, room.core.lock
        self._rows: dict[Row, RowCheck] = {}

    def __bool__(self) -> bool:
        """Whether any row was drawn."""
        return bool(self._rows)

    def draw(self, row: Row) -> None:
        verifier = self._room.core.draw_verifier()
        if verifier is not None:
            self._rows[row] = RowCheck(verifier)

    def has_any(self, rows: Iterable[Row]) -> bool:
        return any(row in self._rows for row in rows)

    def compare_restored(self, model: Any, row: Row) -> None:
        """Compare the state that a row resumed on, before its first pass. After a mismatch, the row is at 0."""
        if (its := self._rows.get(row)) is None:
            return
        its.model = model
        if row.position:
            its.is_whole = False  # unless the check is made
            check, found = self._run(its, row, row.prompt, row.position)
            its.is_whole = check.was_made
            if found is not None:
                self._report(its, row, found, is_first=True)
            elif check.was_made:
                its.first, its.proven = check, row.position

    def compare_last(self, row: Row, logits: mx.array, index: int) -> mx.array | None:
        """Compare the logits (1, 1, V) of a row's token, if the row resumed and the token is the last of its prompt.

        Returns the cold logits (V,) if `logits` are wrong. Then call `begin_again` after the pass.
        """
        its = self._rows.get(row)
        if its is None or its.first is None or index != len(row.prompt) - 1:
            return None
        cold = its.first.cold_logits
        its.wrong, its.first = its.first.compare_last(logits, index), None
        return cold if its.wrong is not None else None

    def begin_again(self, rows: Iterable[Row]) -> None:
        """Restart those rows at 0 for which `compare_last` found wrong logits."""
        for row in rows:
            its = self._rows.get(row)
            if its is not None and its.wrong is not None and not row.is_closed:
                found, its.wrong = its.wrong, None
                self._report(its, row, found, is_first=True)

    def note(self, row: Row, logits: mx.array, *, is_wide: bool) -> None:
        """Keep logits (V,) after the last known token of a row for the second check, if no prompt token is left."""
        its = self._rows.get(row)
        if its is not None and not row.prompt_left and (is_wide or its.noted is None or not its.noted.is_wide):
            its.noted = Noted(row.known_tokens - 1, mx.contiguous(logits), is_wide)
            mx.async_eval(its.noted.logits)  # else they would keep the logits of all rows in memory

    def forget_logits(self, row: Row) -> None:
        """Drop the logits that a row has for its checks, because tokens are removed from it."""
        if (its := self._rows.get(row)) is not None:
            its.first = its.noted = None

    def compare_ends(self, rows: Iterable[Row]) -> None:
        """Make the second check of rows that are about to close. Their state must be evaluated."""
        for row in rows:
            its = self._rows.get(row)
            if its is not None and not row.is_closed and row.position > row.cached_tokens:
                self._compare_end(its, row)

    def end(self, rows: Iterable[Row]) -> None:
        """Count closed rows as verified or skipped. Callers hold the lock."""
        for row in rows:
            if (its := self._rows.pop(row, None)) is not None:
                its.verifier.verified += its.is_verified
                its.verifier.skipped += not its.is_verified

    def _compare_end(self, its: RowCheck, row: Row) -> None:
        position, noted = row.position, its.noted
        was_whole, its.is_whole = its.is_whole, False  # unless the check is made
        # Skip in the middle of a pass: more tokens are evaluated than known then.
        if row.lost is not None or its.model is None or not position == row.clean_tokens <= row.known_tokens:
            return
        # A row that owes tokens has not yet reached the token whose logits were noted.
        end = position if noted is None else max(position, noted.at + 1)
        tokens = row.known.ids()[:end]
        if len(tokens) < end:
            return
        at = None if noted is None else noted.at
        check, found = self._run(its, row, tokens, position, at)
        if found is None and noted is not None:
            found = check.compare_last(noted.logits[None, None], noted.at)
        its.is_whole = was_whole and check.was_made
        if found is not None:
            self._report(its, row, _of_end(found, row, its.proven), is_first=False)

    def _run(
        self, its: RowCheck, row: Row, tokens: TokenIds, position: int, logits_at: int | None = None
    ) -> tuple[Check, Finding | None]:
        """Compare a row at `position` with a cold run over `tokens`, the first tokens of the row."""
        room, layout = self._room, self._room.layout
        with self._lock:
            caches = room.caches_of(row)
        check = Check(its.verifier, layout, tokens, caches, position, logits_at=logits_at, is_part=True)
        keys, copied_bytes = row.known_keys()[: len(tokens)], position * layout.token_bytes

        def book(nbytes: int) -> bool:
            return room.core.book_second(room.booking, nbytes and nbytes + copied_bytes)

        try:
            found = check.run(its.model, keys, caches, room.core.settings.step_size, book, is_untouched=True)
        finally:
            caches.clear()
        its.was_compared |= check.was_made
        return check, found

    def _report(self, its: RowCheck, row: Row, found: Finding, *, is_first: bool) -> None:
        """Quarantine and report what was found wrong. After the first check, the row starts over."""
        request, core = row.request, self._room.core
        with self._lock:
            keys = row.known_keys()[: found.length]
            if is_first:
                self._room.start_over(row)
                its.first, its.noted, its.proven = None, None, 0
            start = core.expel(None, keys, found.start, request.namespace, is_branch=found.is_branch)
            row.mismatch = its.verifier.record(found.mismatch, request.namespace, request.use.tick, start)
            self._room.book()
        its.verifier.warn(row.mismatch)


class RowCheck:
    """The checks of one row.

    Attributes:
        model: the model of the row's passes; None before the first pass.
        first: the first check, until its logits are compared.
        wrong: the mismatch in these logits, until the row starts over.
        noted: the logits that the second check compares.
        proven: how many tokens, from the first on, the first check found right.
        was_compared, is_whole: whether any check was made; whether no check was skipped.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.model: Any = None
        self.first: Check | None = None
        self.wrong: Finding | None = None
        self.noted: Noted | None = None
        self.proven = 0
        self.was_compared, self.is_whole = False, True

    @property
    def is_verified(self) -> bool:
        return self.was_compared and self.is_whole


def _of_end(found: Finding, row: Row, proven: int) -> Finding:
    """What to quarantine after a mismatch in the second check; the first check found `proven` tokens right."""
    if found.mismatch.part is Part.ROWS and not found.is_branch and found.start is not None:
        return found  # from the first wrong token on
    start = proven if found.mismatch.row is None else min(proven, found.mismatch.row)
    # What the row gave to the tree is wrong from `start` on, also for prompts that continue differently.
    length = row.path_end if row.path_end > start else found.mismatch.resume_offset
    return Finding(found.mismatch, length, start)
