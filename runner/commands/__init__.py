"""Commands of `radixcache`, a file each; runner/cli.py registers them."""
