"""Bytes: the ledger that counts them, and the budget of those who did not name one."""
