"""Recorded conversations: what they are, and readers for the formats they come in."""

from runner.conversations.conversation import Conversation, ConversationError
from runner.conversations.reader import ReadResult, read_conversations

__all__ = ["Conversation", "ConversationError", "ReadResult", "read_conversations"]
