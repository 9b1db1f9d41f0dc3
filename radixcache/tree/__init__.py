"""The radix tree of keys, the state of its nodes, what happened to it and what went of late."""
