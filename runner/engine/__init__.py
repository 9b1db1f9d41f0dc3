"""Generate replies with one model: many at a time, or one by itself."""
