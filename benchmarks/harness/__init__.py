"""Shared parts of the benchmarks: models, requests, servers and records."""
