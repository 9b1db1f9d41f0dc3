"""Simulation: traces through the deployed PrefixCache, with sizes in place of arrays. One file per noun."""
