"""Benchmarks: one file per question. Each prints a table and writes JSON under benchmarks/results/."""
