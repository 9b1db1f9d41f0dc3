"""Many requests at once, a row each, on one buffer of cells."""
