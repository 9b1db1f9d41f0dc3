"""Layout: all layers of a model as one, of arrays, or of sizes, with which a simulator drives the same cache."""

from __future__ import annotations

from radixcache.layers.arrays import ArrayLayout
from radixcache.layers.sizes import SizedLayout

Layout = ArrayLayout | SizedLayout
