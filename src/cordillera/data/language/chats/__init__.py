"""Chats, preferences and problems that language models are tuned on."""
