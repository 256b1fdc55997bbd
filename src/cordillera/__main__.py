"""``python -m cordillera`` is the ``cordillera`` command."""

from cordillera.cli import main

main()
