"""The commands of `radixcache`, a file each."""
