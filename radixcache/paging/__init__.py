"""State in and out of the live caches under the budget: live paths, slots, pager, evictor, recorder, pins."""
