"""Simulations of a cache without a model: policies, replicas, hit ratio curves, advice, drafts, grown trees."""
