"""The error of a benchmark whose peer cannot be measured here."""

from __future__ import annotations


class PeerUnavailable(Exception):
    """A peer cannot be measured here; the message gives the reason and a remedy."""
