"""What times, checks and records: one timer, one truth, one schema of records. The commands, the tests and the docs all go through it."""
