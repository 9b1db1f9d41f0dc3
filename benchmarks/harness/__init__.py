"""Shared parts of the benchmarks: models, requests, servers, records and plots."""
