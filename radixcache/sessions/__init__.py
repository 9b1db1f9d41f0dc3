"""One request at a time: from what could be restored to what becomes a stored prefix."""
