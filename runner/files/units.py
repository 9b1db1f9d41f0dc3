"""Units in which bytes are shown."""

MIB = 1 << 20
GIB = 1 << 30
