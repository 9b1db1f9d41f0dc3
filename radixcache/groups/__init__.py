"""Many requests at once, a row each, which decode together straight from the tree."""
