"""Messages to tokens and marks, by the tokenizer's own chat template."""
