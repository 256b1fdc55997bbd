"""Names that changed since result files were measured, each with its old name: a new name is not new code.

An entry may be removed when the files that depend on it have been measured again.
"""

RENAMED: dict[str, str] = {"is_interpreted": "_interpreted"}
