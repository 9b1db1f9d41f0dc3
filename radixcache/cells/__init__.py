"""Many sequences in one buffer of cells, one cell per token; a prefix that several share is held once."""
