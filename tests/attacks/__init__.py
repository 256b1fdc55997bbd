"""Attacks on the library as its users meet it: whole commands on damaged, hostile and unlucky files.

``make test-attacks`` runs all of them. Each attack ends in one of two ways: the command does what it does without the
attack, or it refuses in a sentence that names the file.
"""
