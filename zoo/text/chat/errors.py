"""Errors of chat templates."""


class ChatError(ValueError):
    """Raised for a chat template that is missing or damaged, and for messages that it refuses."""


class NoChatTemplateError(ChatError):
    """Raised for a checkpoint directory without a chat template."""
