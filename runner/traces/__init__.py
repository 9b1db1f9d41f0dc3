"""Traces: what they are, readers for the formats they come in, writers, and made-up ones."""
