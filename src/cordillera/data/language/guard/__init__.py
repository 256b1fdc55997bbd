"""Prompts that ask a language model whether a turn of a conversation is safe, and a set of examples."""
