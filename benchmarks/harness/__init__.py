"""What several benchmarks share: their models, their requests, and how figures are recorded and drawn."""
