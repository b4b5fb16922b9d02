"""`python -m kdakit`: the command `kdakit`."""

from kdakit.cli.main import main

raise SystemExit(main())
