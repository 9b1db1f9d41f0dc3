"""A server that speaks OpenAI's and Anthropic's APIs, on one generation thread and a prefix cache per model."""
