"""Every architecture of mlx-lm as a tiny random model, and whether a prefix cache gives it the right state.

configuration   a tiny configuration from an architecture's own ModelArgs
exceptions      what the rules for that cannot know
weights         random weights under which a wrong state shows
catalogue       which modules of mlx_lm.models are models, which are another's layers, which cannot be built
temporal        the state of live caches in temporal order
right_state     the procedure that compares a cache with cold runs
document        docs/architectures.md: measure all, write, check
"""
