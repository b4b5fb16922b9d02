"""A file per kernel, named after it."""
