"""Which messages or template pieces of recorded conversations break the prefix."""
