"""One reply: what drives the model token by token, and what becomes of the tokens."""
