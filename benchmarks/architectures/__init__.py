"""Every architecture of mlx-lm as a tiny random model, and whether a prefix cache gives it the right state.

kinds           a tiny configuration of every architecture
catalogue       which modules of mlx_lm.models are models, which are another's layers, which cannot be built
temporal        the state of live caches in temporal order
right_state     the procedure that compares a cache with cold runs
document        docs/architectures.md: measure all, write, check
"""
