"""What is asked of a model: recorded conversations, the order of their requests, and these as tokens."""
