"""Language models: the demo model, tiny random ones, loading, and what their state takes in bytes."""
