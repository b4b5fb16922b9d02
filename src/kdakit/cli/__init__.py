"""The `kdakit` command. Nothing else in the package imports this folder."""
