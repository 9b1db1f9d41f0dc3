"""What a cache would do, without a model: simulated policies, curves of hit ratios, advice, grown trees."""
