"""What tests of replays share."""


class Silence:
    """Watches a replay and remembers what it was told."""

    def __init__(self):
        self.runs, self.advances, self.done = [], [], []

    def run_started(self, cache, requests):
        self.runs.append((cache, requests))

    def request_advanced(self, cache, done_tokens, prompt_tokens):
        self.advances.append((cache, done_tokens, prompt_tokens))

    def request_done(self, cache, row):
        self.done.append((cache, row.prompt_tokens))
