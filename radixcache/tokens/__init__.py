"""Token ids and keys: checks of what callers pass, what is known of a request, its text, what is quarantined."""
