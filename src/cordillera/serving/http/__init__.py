"""Servers over HTTP."""
